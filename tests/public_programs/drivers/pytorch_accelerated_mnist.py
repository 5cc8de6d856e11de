"""Train with the Trainer of pytorch-accelerated, and evaluate."""

from pytorch_accelerated import Trainer
from torch import nn, optim
from torchvision import transforms
from torchvision.datasets import MNIST

model = nn.Sequential(nn.Flatten(), nn.Linear(784, 16), nn.ReLU(), nn.Linear(16, 10))
trainer = Trainer(
    model, loss_func=nn.CrossEntropyLoss(), optimizer=optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
)
data = MNIST(".", download=True, transform=transforms.ToTensor())
trainer.train(
    train_dataset=data, eval_dataset=data, num_epochs=2, per_device_batch_size=8, gradient_accumulation_steps=2
)
trainer.evaluate(dataset=data, per_device_batch_size=8)
trainer.save_checkpoint("checkpoint.pt")
