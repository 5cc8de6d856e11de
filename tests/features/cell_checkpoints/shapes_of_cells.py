"""Cells that train, in the shapes that people write, for tests: what stands above, and the cell."""

from __future__ import annotations

__all__ = ["EXACT", "MADE_IN_THE_LOOP", "REFUSED", "SETUP", "TRAININGS_THAT_ENDED", "WITH_WORKERS"]

SETUP = "model = net(); opt = torch.optim.Adam(model.parameters(), 1e-2); history = []\n"

_FLAT = """
for epoch in range(3):
    total = 0.0
    for x, y in loader:
        total += step(model, opt, x, y)
    history.append(total)
"""

_BAR = """
from tqdm import tqdm as bar
"""

EXACT = {
    "flat": (SETUP, _FLAT),
    "all in the cell": (
        "",
        """
model = net(); opt = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
sched = torch.optim.lr_scheduler.OneCycleLR(opt, 0.05, total_steps=3 * len(loader)); history = {"loss": [], "lr": []}
for epoch in range(3):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y); loss.backward(); nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step(); sched.step(); opt.zero_grad()
        history["loss"].append(loss.item()); history["lr"].append(sched.get_last_lr()[0])
""",
    ),
    "train and evaluate functions": (
        """
def train_epoch(model, loader, opt):
    model.train(); total = 0.0
    for x, y in loader: total += step(model, opt, x, y)
    return total / len(loader)
@torch.no_grad()
def evaluate(model, loader):
    model.eval(); right = 0
    for x, y in loader: right += (model(x).argmax(1) == y).sum().item()
    return right / 12
""",
        """
model = net(); opt = torch.optim.AdamW(model.parameters(), 1e-2); losses, accs = [], []
before = evaluate(model, val_loader)
for epoch in range(3):
    loss = train_epoch(model, loader, opt)
    accs.append(evaluate(model, val_loader)); losses.append(loss)
""",
    ),
    "one train() function": (
        '''
def train(model, loader, epochs=3, lr=1e-2):
    """Train."""
    opt = torch.optim.Adam(model.parameters(), lr)
    sched = torch.optim.lr_scheduler.StepLR(opt, 4, 0.5)
    log = []
    for epoch in range(epochs):
        model.train()
        for number, (x, y) in enumerate(loader):
            log.append((epoch, number, step(model, opt, x, y))); sched.step()
    return log
''',
        "model = net()\nlog = train(model, loader)\n",
    ),
    "while with a step counter": (
        "",
        """
model = net(); opt = torch.optim.SGD(model.parameters(), 0.05); n = 0; done = False
while not done:
    for x, y in loader:
        step(model, opt, x, y); n += 1
        if n >= 16: done = True; break
""",
    ),
    "early stopping, best_state": (
        """
def evaluate(model):
    model.eval()
    with torch.no_grad(): v = sum(F.cross_entropy(model(x), y).item() for x, y in val_loader)
    model.train(); return v
""",
        """
model = net(); opt = torch.optim.Adam(model.parameters(), 3e-2); best, best_state, bad, history = math.inf, None, 0, []
for epoch in range(6):
    for x, y in loader:
        step(model, opt, x, y)
    val = evaluate(model); history.append(val)
    if val < best: best, best_state, bad = val, copy.deepcopy(model.state_dict()), 0
    else:
        bad += 1
        if bad >= 2: break
model.load_state_dict(best_state)
""",
    ),
    "tqdm around the loader, in a name": (
        _BAR,
        SETUP
        + """
for epoch in range(3):
    pbar = bar(loader)
    for x, y in pbar:
        history.append(step(model, opt, x, y)); pbar.set_postfix(loss=history[-1])
""",
    ),
    "enumerate(tqdm(loader))": (
        _BAR,
        SETUP
        + """
for epoch in range(3):
    for i, (x, y) in enumerate(bar(loader)):
        step(model, opt, x, y); history.append(i)
""",
    ),
    "zip of two loaders": (
        "",
        SETUP
        + """
other = DataLoader(train_set, 8, shuffle=True)
for epoch in range(3):
    for (x, y), (x2, y2) in zip(loader, other):
        history.append(step(model, opt, torch.cat([x, x2]), torch.cat([y, y2])))
""",
    ),
    "Trainer().fit()": (
        '''
class Trainer:
    def __init__(self, model, lr):
        self.model, self.opt, self.n, self.log = model, torch.optim.Adam(model.parameters(), lr), 0, []
    def train_step(self, batch):
        x, y = batch; self.n += 1
        return step(self.model, self.opt, x, y)
    def run_epoch(self, loader):
        """Train for an epoch."""
        for batch in loader: self.log.append(self.train_step(batch))
    def fit(self, loader, epochs):
        for self.epoch in range(epochs):
            self.run_epoch(loader)
            with torch.no_grad(): self.val = sum(F.cross_entropy(self.model(x), y).item() for x, y in val_loader)
''',
        "model = net(); trainer = Trainer(model, 1e-2)\ntrainer.fit(loader, 3)\n",
    ),
    "GAN": (
        "",
        """
G, D = net(4, 8), net(8, 1); oG, oD = torch.optim.Adam(G.parameters(), 1e-3), torch.optim.Adam(D.parameters(), 1e-3)
bce = nn.BCEWithLogitsLoss(); fixed = torch.randn(8, 4); shots = []
for epoch in range(2):
    for x, _ in loader:
        fake = G(torch.randn(8, 4))
        oD.zero_grad(); (bce(D(x), torch.ones(8, 1)) + bce(D(fake.detach()), torch.zeros(8, 1))).backward(); oD.step()
        oG.zero_grad(); bce(D(fake), torch.ones(8, 1)).backward(); oG.step()
    with torch.no_grad(): shots.append(G(fixed))
""",
    ),
    "EMA": (
        """
class EMA:
    def __init__(s, m, d): s.shadow = {k: v.clone() for k, v in m.state_dict().items()}; s.d = d
    def update(s, m):
        for k, v in m.state_dict().items():
            s.shadow[k] = s.shadow[k] * s.d + v * (1 - s.d) if v.is_floating_point() else v.clone()
""",
        SETUP
        + """
ema = EMA(model, 0.9); swa = torch.optim.swa_utils.AveragedModel(model)
for epoch in range(3):
    for x, y in loader:
        step(model, opt, x, y); ema.update(model)
    swa.update_parameters(model)
""",
    ),
    "scheduler per step, plateau per epoch": (
        "",
        """
model = net(); opt = torch.optim.SGD(model.parameters(), 0.1); warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1)
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, patience=0)
for epoch in range(3):
    t = 0.0
    for x, y in loader:
        t += step(model, opt, x, y); warm.step()
    plateau.step(t)
""",
    ),
    "torch.save of the best": (
        "",
        SETUP
        + """
best = 1e9
for epoch in range(3):
    for x, y in loader:
        loss = step(model, opt, x, y)
        if loss < best: best = loss; torch.save(model.state_dict(), BEST)
model.load_state_dict(torch.load(BEST))
""",
    ),
    "range(steps), random batches": (
        "",
        SETUP
        + """
gen = torch.Generator().manual_seed(3); npg = np.random.default_rng(2)
for number in range(16):
    idx = torch.randint(0, 60, (8,), generator=gen); noise = torch.from_numpy(npg.normal(size=(8, 8))).float()
    step(model, opt, X[idx] + 0.1 * noise, Y[idx])
""",
    ),
    "randperm(n).split(k)": (
        "",
        SETUP
        + """
for epoch in range(3):
    for idx in torch.randperm(48).split(8):
        step(model, opt, X[idx], Y[idx])
""",
    ),
    "it = iter(loader), next(it)": (
        "",
        SETUP
        + """
it = iter(loader)
for number in range(16):
    try: x, y = next(it)
    except StopIteration: it = iter(loader); x, y = next(it)
    step(model, opt, x, y)
""",
    ),
    "LBFGS with a closure": (
        "",
        """
model = nn.Linear(8, 4); opt = torch.optim.LBFGS(model.parameters(), 0.3, max_iter=3)
for epoch in range(2):
    for x, y in DataLoader(train_set, 8, shuffle=True):
        def closure():
            opt.zero_grad(); loss = F.cross_entropy(model(x), y); loss.backward(); return loss
        opt.step(closure)
""",
    ),
    "two stages by one function": (
        """
def fit(model, lr, epochs):
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr)
    for epoch in range(epochs):
        for x, y in loader: step(model, opt, x, y)
    return lr * epochs
""",
        """
model = net()
for p in model[0].parameters(): p.requires_grad_(False)
first = fit(model, 1e-2, 1)
for p in model.parameters(): p.requires_grad_(True)
second = fit(model, 1e-3, 2)
""",
    ),
    "nonlocal, with, try, if": (
        """
def outer(model):
    seen, calls = 0, {"n": 0}
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    def one(x, y):
        nonlocal seen
        seen += len(x); calls["n"] += 1
        return step(model, opt, x, y)
    try:
        with torch.enable_grad():
            for epoch in range(3):
                if epoch >= 0:
                    for x, y in loader: last = one(x, y)
                else: pass
    finally: pass
    return seen, calls, last
""",
        "model = net()\nout = outer(model)\n",
    ),
    "own accumulation": (
        "",
        SETUP
        + """
for epoch in range(4):
    for i, (x, y) in enumerate(loader):
        (F.cross_entropy(model(x), y) / 2).backward()
        if (i + 1) % 2 == 0: opt.step(); opt.zero_grad()
""",
    ),
    "a lambda made in the loop, used later": (
        "",
        SETUP
        + _FLAT.replace("    total = 0.0", "    total = 0.0; weight = lambda l: l * (1 + epoch)").replace(
            "total += ", "total += weight(1) * "
        ),
    ),
    "a list that grows under its loop": (
        "",
        SETUP
        + """
todo = list(range(2))
for k in todo:
    if k == 0: todo.append(9)
    for x, y in loader: history.append((k, step(model, opt, x, y)))
""",
    ),
    "a class attribute that counts": (
        "class Count: n = 0\n",
        SETUP + _FLAT.replace("    history", "    Count.n += 1; history").replace("total)", "total + Count.n)"),
    ),
    "a grid by itertools.product": (
        "grid = {'lr': [1e-2, 1e-3], 'wd': [0.0, 0.1]}\nresults = []\n",
        """
for lr, wd in itertools.product(*grid.values()):
    model = net(); opt = torch.optim.AdamW(model.parameters(), lr, weight_decay=wd)
    for x, y in loader: loss = step(model, opt, x, y)
    results.append((lr, wd, loss))
""",
    ),
    "a grid of scikit-learn": (
        "from sklearn.model_selection import ParameterGrid\nresults = []\n"
        "torch.manual_seed(0); random.seed(0); np.random.seed(0)  # its first import in a process draws numbers\n",
        """
for number, chosen in enumerate(ParameterGrid({"lr": [1e-2, 1e-3], "wd": [0.0, 0.1]})):
    model = net(); opt = torch.optim.AdamW(model.parameters(), chosen["lr"], weight_decay=chosen["wd"])
    for x, y in loader: loss = step(model, opt, x, y)
    results.append((number, chosen, loss))
""",
    ),
    "REINFORCE, a distribution in a name": (
        "goal = torch.randn(8, 4).argmax(1)\n",
        """
policy = net(); opt = torch.optim.Adam(policy.parameters(), 1e-2); rewards = []
for episode in range(4):
    for x, y in loader:
        dist = torch.distributions.Categorical(logits=policy(x))
        action = dist.sample()
        if episode == 3 and len(x) > 100: continue
        reward = (action == y).float()
        loss = -(dist.log_prob(action) * (reward - reward.mean())).mean() - 0.01 * dist.entropy().mean()
        opt.zero_grad(); loss.backward(); opt.step(); rewards.append(reward.sum().item())
    print(episode, sum(rewards[-6:]))
""",
    ),
    "a distribution in a name of a function": (
        """
def learn(policy):
    opt = torch.optim.Adam(policy.parameters(), 1e-2)
    for x, y in loader:
        dist = torch.distributions.Categorical(logits=policy(x)); action = dist.sample()
        loss = -(dist.log_prob(action) * (action == y).float()).mean()
        opt.zero_grad(); loss.backward(); opt.step()
    return loss.item()
""",
        "policy = net(); first = learn(policy)\nlater = learn(policy)\n",
    ),
    "a loop in a match, and one in an else": (
        "",
        SETUP
        + """
match [1, 2]:
    case [a, b]:
        for epoch in range(2):
            for x, y in loader: step(model, opt, x, y)
        else:
            for x, y in loader: history.append(step(model, opt, x, y))
""",
    ),
}
"""Shapes that go on bit by bit, wherever they end."""

WITH_WORKERS = {
    "two workers with noise": (
        "",
        "loader = DataLoader(Noisy(), 8, shuffle=True, num_workers=2)\n"
        + SETUP
        + _FLAT.replace("range(3)", "range(2)"),
    ),
}

REFUSED = {
    "a comprehension": (
        "def run(fold):\n    model = net(); opt = torch.optim.Adam(model.parameters(), 1e-2)\n"
        "    for x, y in loader: loss = step(model, opt, x, y)\n    return loss\n",
        "results = [run(fold) for fold in range(3)]\n",
        "for fold in range(3): results.append(run(fold)) can.",
    ),
    "a distribution that is read in the next round": (
        "",
        SETUP
        + """
dist = None
for x, y in loader:
    before, dist = dist, torch.distributions.Categorical(logits=model(x))
    step(model, opt, x, y)
""",
        "dist is a Categorical, which no file of data can hold",
    ),
    "a distribution that is read behind the loop": (
        "",
        SETUP
        + """
for epoch in range(2):
    for x, y in loader:
        dist = torch.distributions.Categorical(logits=model(x).detach()); step(model, opt, x, y)
    history.append(dist.entropy().mean().item())
""",
        "dist is a Categorical, which no file of data can hold",
    ),
    "a distribution that a magic may read": (
        "def get_ipython(): return types.SimpleNamespace(run_line_magic=lambda name, line: None)\nimport types\n",
        SETUP
        + """
for x, y in loader:
    dist = torch.distributions.Categorical(logits=model(x).detach()); step(model, opt, x, y)
    get_ipython().run_line_magic("time", "dist.entropy()")
""",
        "dist is a Categorical, which no file of data can hold",
    ),
    "a distribution that a function reads": (
        "def entropy(): return dist.entropy().mean().item()\n",
        SETUP
        + """
for x, y in loader:
    dist = torch.distributions.Categorical(logits=model(x).detach()); step(model, opt, x, y)
    history.append(entropy())
""",
        "dist is a Categorical, which no file of data can hold",
    ),
    "a generator over the loader": (
        "def cycle(loader):\n    while True:\n        for b in loader: yield b\n",
        SETUP + "data = cycle(loader)\nfor number in range(9):\n    x, y = next(data)\n    step(model, opt, x, y)\n",
        "generator",
    ),
}
"""Shapes that are refused before the second step, and a part of the sentence."""

MADE_IN_THE_LOOP = {
    "folds, a list of results": (
        """
def run(fold):
    model = net(); opt = torch.optim.Adam(model.parameters(), 1e-2)
    for epoch in range(1):
        for x, y in loader: loss = step(model, opt, x, y)
    return model, loss
""",
        "results = []\nfor fold in range(3): results.append(run(fold))\nmodel = results[-1][0]\n",
    ),
    "hooks that are objects, in folds": (
        """
import warnings
warnings.simplefilter("ignore", FutureWarning)
def normed():
    model = net(); torch.nn.utils.weight_norm(model[0])
    return model
def run(fold):
    model = normed()
    opt = torch.optim.Adam(model.parameters(), 1e-2)
    for x, y in loader: loss = step(model, opt, x, y)
    return model, loss
""",
        "results = []\nfor fold in range(3): results.append(run(fold))\nmodel = results[-1][0]\n",
    ),
    "a model and an optimizer of each round": (
        "",
        """
best = []
for lr in (1e-2, 1e-3):
    model = net(); opt = torch.optim.Adam(model.parameters(), lr)
    for x, y in loader: loss = step(model, opt, x, y)
    best.append(loss)
""",
    ),
}
"""Shapes whose models are made in a round of the outermost loop."""

OWN_ORDERS = {
    "a generator of the loader": (
        "",
        "g = torch.Generator().manual_seed(5)\nloader = DataLoader(Noisy(), 8, shuffle=True, generator=g)\n"
        + SETUP
        + _FLAT,
    ),
    "a sampler of the user's, with a counter": (
        """
class Own(torch.utils.data.Sampler):
    epoch = 0
    def __init__(self): self.epoch = 0; self.rng = np.random.default_rng(1)
    def __len__(self): return 48
    def __iter__(self):
        self.epoch += 1; random.Random(self.epoch).random()
        return iter(((self.rng.permutation(48) + self.epoch) % 48).tolist())
loader = DataLoader(Noisy(), 8, sampler=Own())
""",
        SETUP + _FLAT,
    ),
    "a weighted sampler, and one of torch's generators": (
        "w = torch.rand(48)\n",
        "loader = DataLoader(Noisy(), 8, sampler=torch.utils.data.WeightedRandomSampler(w, 48))\n" + SETUP + _FLAT,
    ),
    "a stream with a generator": (
        """
class Stream(IterableDataset):
    def __init__(self): self.g = torch.Generator().manual_seed(2)
    def __iter__(self):
        for i in torch.randperm(48, generator=self.g).tolist(): yield train_set[i]
loader = DataLoader(Stream(), 8)
""",
        SETUP + _FLAT,
    ),
    "zip of two loaders that nobody holds": (
        "",
        SETUP
        + """
for epoch in range(3):
    for (x, y), (x2, y2) in zip(DataLoader(Noisy(), 8, shuffle=True), DataLoader(train_set, 8, shuffle=True)):
        history.append(step(model, opt, torch.cat([x, x2]), torch.cat([y, y2])))
""",
    ),
    "folds of a library's generator": (
        """
def split(n):
    rng = np.random.default_rng(7)
    for k in range(3):
        order = rng.permutation(n); yield order[: n // 2], order[n // 2 :]
split.__code__ = split.__code__.replace(co_filename=np.__file__)
""",
        SETUP
        + """
for fold, (train, _) in enumerate(split(48)):
    for at in range(0, 24, 4): history.append((fold, step(model, opt, X[train[at : at + 4]], Y[train[at : at + 4]])))
""",
    ),
    "a range whose end moves": (
        "",
        SETUP
        + """
n = 8
for k in range(n):
    n += 1
    for m in range(k % 2 + 1): history.append(step(model, opt, X, Y))
""",
    ),
}
"""Orders that hang on more than three generators."""

_TRAIN = """
def train(lr, epochs=2):
    model = net(); opt = torch.optim.Adam(model.parameters(), lr); log = []; every = 2
    for epoch in range(epochs):
        for x, y in loader:
            loss = step(model, opt, x, y)
            if len(log) % every == 0: log.append(loss)
            else: log.append(-loss)
    return model, log
"""

TRAININGS_THAT_ENDED = {
    "two calls that return a model and its losses": (
        _TRAIN,
        "first, losses = train(1e-2)\nsecond, others = train(3e-2)\n",
    ),
    "two calls in a function": (
        _TRAIN
        + """
def both(lrs):
    first, losses = train(lrs[0])
    second, others = train(lrs[1])
    return first, second, losses + others
""",
        "result = both([1e-2, 3e-2])\n",
    ),
    "two calls, and what the first returned is looked at": (
        _TRAIN,
        "first, losses = train(1e-2)\nsizes = [len(each) for each in first.parameters()]\n"
        "second, others = train(3e-2)\n",
    ),
    "a second call that is given what the first returned": (
        _TRAIN
        + """
def tune(model, lr):
    opt = torch.optim.SGD(model.parameters(), lr)
    for epoch in range(2):
        for x, y in loader: step(model, opt, x, y)
    return model
""",
        "first, losses = train(1e-2)\nsecond = tune(first, 1e-3)\n",
    ),
    "a training, and a loop that makes data of what it has learned": (
        """
def train_on(data, epochs):
    model.train(); own = DataLoader(data, 8, shuffle=True, generator=torch.Generator().manual_seed(len(data)))
    for epoch in range(epochs):
        for x, y in own: loss = step(model, opt, x, y)
    return loss
""",
        SETUP
        + """
history.append(train_on(train_set, 1))
for r in range(3):
    model.eval()
    with torch.no_grad(): guess = model(X).argmax(1)
    chosen = torch.utils.data.ConcatDataset([train_set, TensorDataset(X[: 8 * r], guess[: 8 * r])])
    history.append(train_on(chosen, 1))
""",
    ),
    "a number and a list between two calls": (
        """
def fit(model, lr, epochs=2):
    losses = []; opt = torch.optim.SGD(model.parameters(), lr)
    for epoch in range(epochs):
        for x, y in loader: losses.append(step(model, opt, x, y))
    return losses
def both(model):
    lr = 0.1; stages = []
    first = fit(model, lr)
    lr = lr / 2; stages = stages + [len(first)]
    second = fit(model, lr)
    return lr, stages, first + second
""",
        "model = net(); lr = 0.1; stages = []\nfirst = fit(model, lr)\nlr = lr / 2; stages = stages + [len(first)]\n"
        "second = fit(model, lr)\nresult = both(model)\n",
    ),
    "two calls that fill what they return": (
        """
def fit(model, lr):
    history = {"loss": [], "lr": lr}
    opt = torch.optim.SGD(model.parameters(), lr)
    for epoch in range(2):
        for x, y in loader: history["loss"].append(step(model, opt, x, y))
    return history
""",
        "model = net()\nhead = fit(model, 1e-2)\nfull = fit(model, 1e-2)\n",
    ),
}
"""Cells whose position may be behind a training that is over, and has returned objects of its own."""
