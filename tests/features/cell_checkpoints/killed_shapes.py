"""Cells that are killed in a real kernel, in the shapes that people write, for tests. They print as people's do."""

from __future__ import annotations

from dataclasses import dataclass

from features.cell_checkpoints.shapes_of_cells import EXACT, MADE_IN_THE_LOOP, OWN_ORDERS, SETUP, WITH_WORKERS

__all__ = ["IN_OTHER_NUMBERS", "KILLED", "KilledShape"]


@dataclass(frozen=True, slots=True)
class KilledShape:
    """A cell, and what stands above it.

    flags: Further flags of its line.
    """

    above: str
    cell: str
    flags: str = ""


def _of(shapes: dict[str, tuple[str, str]], name: str, *, said: str = "") -> KilledShape:
    """Return one of the shapes of other tests; `said` is printed at its end."""
    above, cell = shapes[name]
    return KilledShape(above, cell + (f"print({said})\n" if said else ""))


_FLAT = (
    SETUP
    + """
for epoch in range(4):
    total = 0.0
    for x, y in loader:
        total += step(model, opt, x, y)
    history.append(total)
    print(f"epoch {epoch}: {total:.6f}")
"""
)

KILLED = {
    "a flat loop": KilledShape("", _FLAT),
    "a function with epochs": _of(EXACT, "one train() function", said="log[-1]"),
    "a class with fit()": _of(EXACT, "Trainer().fit()", said="trainer.log[-3:]"),
    "early stopping": _of(EXACT, "early stopping, best_state", said="history"),
    "a GAN": _of(EXACT, "GAN"),
    "EMA": _of(EXACT, "EMA"),
    "schedulers of several kinds": KilledShape(
        "",
        """
model = net(); opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9); S = torch.optim.lr_scheduler; rates = []
warm, cosine = S.LinearLR(opt, 0.1, total_iters=5), S.CosineAnnealingWarmRestarts(opt, 4)
both = S.SequentialLR(opt, [warm, cosine], [5]); plateau = S.ReduceLROnPlateau(opt, patience=0)
for epoch in range(4):
    t = 0.0
    for x, y in loader:
        t += step(model, opt, x, y); both.step(); rates.append(opt.param_groups[0]["lr"])
    plateau.step(t); print(epoch, rates[-1], t)
""",
    ),
    "zip of two loaders": _of(EXACT, "zip of two loaders", said="history[-2:]"),
    "enumerate(tqdm(loader))": _of(EXACT, "enumerate(tqdm(loader))", said="history"),
    "tqdm in a name": _of(EXACT, "tqdm around the loader, in a name"),
    "folds": _of(MADE_IN_THE_LOOP, "folds, a list of results"),
    "a loader with two workers": _of(WITH_WORKERS, "two workers with noise", said="history"),
    "an IterableDataset": _of(OWN_ORDERS, "a stream with a generator", said="history"),
    "while, with an iterator of its own": KilledShape(
        "",
        SETUP
        + """
batches, n = iter(loader), 0
while n < 20:
    batch = next(batches, None)
    if batch is None:
        batches = iter(loader)
        continue
    x, y = batch
    history.append(step(model, opt, x, y)); n += 1
    if n % 5 == 0: print(n, sum(history[-5:]) / 5)
""",
    ),
    "autocast and a GradScaler of its own": KilledShape(
        "",
        SETUP
        + """
scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=7)
for epoch in range(3):
    for x, y in loader:
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward(); scaler.unscale_(opt); nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(opt); scaler.update(); history.append(loss.item())
    print(epoch, scaler.get_scale(), sum(history[-6:]))
""",
    ),
    "clipping and its own accumulation": KilledShape(
        "",
        SETUP
        + """
norms = []
for epoch in range(5):
    for i, (x, y) in enumerate(loader):
        loss = F.cross_entropy(model(x), y) / 2
        loss.backward()
        if (i + 1) % 2 == 0 or i + 1 == len(loader):
            norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.5))); opt.step(); opt.zero_grad()
    print(epoch, len(norms), norms[-1])
""",
    ),
    "-p bf16": KilledShape("", _FLAT, "-p bf16"),
    "-p fp16 -a 3": KilledShape("", _FLAT.replace("range(4)", "range(10)"), "-p fp16 -a 3"),
    "two stages": _of(EXACT, "two stages by one function", said="first, second"),
    "the best model is a copy": KilledShape(
        """
@torch.no_grad()
def evaluate(model):
    model.eval(); total = sum(F.cross_entropy(model(x), y).item() for x, y in val_loader)
    model.train(); return total
""",
        """
model = net(); opt = torch.optim.Adam(model.parameters(), 1e-2); best, best_model = float("inf"), None
metrics = []
for epoch in range(4):
    running = 0.0
    for x, y in loader: running += step(model, opt, x, y)
    val = evaluate(model)
    metrics.append({"epoch": epoch, "train": running / len(loader), "val": val})
    if val < best:
        best, best_model = val, copy.deepcopy(model)
    print("epoch %d val %.6f best %.6f" % (epoch, val, best))
score = evaluate(best_model)
""",
    ),
    "augmentation by numpy and random": KilledShape(
        """
def augmented(x):
    x = x.clone()
    if random.random() < 0.5: x = x.flip(0)
    x += torch.from_numpy(np.random.normal(0, 0.1, x.shape)).float()
    return x[random.sample(range(len(x)), len(x))]
class Augmented(Dataset):
    def __init__(s, data): s.data = data
    def __len__(s): return len(s.data)
    def __getitem__(s, i): x, y = s.data[i]; return augmented(x), y
loader = DataLoader(Augmented(train_set), 8, shuffle=True)
""",
        _FLAT.replace("step(model, opt, x, y)", "step(model, opt, augmented(x.T).T, y)"),
    ),
    "an LSTM whose state is carried over": KilledShape(
        """
class Tagger(nn.Module):
    def __init__(s):
        super().__init__(); s.lstm = nn.LSTM(3, 8, 2, batch_first=True, dropout=0.1); s.head = nn.Linear(8, 1)
    def forward(s, x, state): out, state = s.lstm(x, state); return s.head(out), state
series = torch.randn(8, 60, 3); target = series.cumsum(1).sum(2, keepdim=True) / 10
""",
        """
model = Tagger(); opt = torch.optim.RMSprop(model.parameters(), 1e-2); losses = []
for epoch in range(2):
    state = None
    for t in range(0, 60, 6):
        out, state = model(series[:, t : t + 6], state)
        state = tuple(s.detach() for s in state)
        loss = F.mse_loss(out, target[:, t : t + 6])
        opt.zero_grad(); loss.backward(); opt.step(); losses.append(loss.item())
    print(f"{epoch}: {sum(losses[-10:]):.8f}")
""",
    ),
    "a history of lists": KilledShape(
        "class Meter:\n    def __init__(s): s.sum, s.n = 0.0, 0\n    def add(s, v, k): s.sum += v * k; s.n += k\n"
        "    @property\n    def mean(s): return s.sum / s.n\n",
        """
model = net(); opt = torch.optim.AdamW(model.parameters(), 1e-2)
hist = {"train": {"loss": [], "acc": []}, "val": {"loss": [], "acc": []}}
for epoch in range(3):
    for phase in ["train", "val"]:
        model.train(phase == "train"); losses, right = Meter(), 0
        for x, y in {"train": loader, "val": val_loader}[phase]:
            opt.zero_grad()
            with torch.set_grad_enabled(phase == "train"):
                out = model(x); loss = F.cross_entropy(out, y)
                if phase == "train": loss.backward(); opt.step()
            losses.add(loss.item(), len(x)); right += (out.argmax(1) == y).sum().item()
        hist[phase]["loss"].append(losses.mean); hist[phase]["acc"].append(right / losses.n)
        print(epoch, phase, losses.mean, right)
""",
    ),
    "a closure": _of(EXACT, "LBFGS with a closure"),
    "nonlocal, with, try, if": _of(EXACT, "nonlocal, with, try, if", said="out"),
}
"""Shapes that end as if nothing had happened, bit by bit, in the same number of ranks."""

_EXACT_NUMBERS = """
torch.set_default_dtype(torch.float64)
def net(i=8, o=4):
    torch.manual_seed(1); return nn.Sequential(nn.Linear(i, 16), nn.Tanh(), nn.Linear(16, o))
X, Y = torch.randn(60, 8), torch.randint(0, 4, (60,))
train_set, val_set = random_split(TensorDataset(X, Y), [48, 12])
loader, val_loader = DataLoader(train_set, 8, shuffle=True), DataLoader(val_set, 6)
"""

IN_OTHER_NUMBERS = {
    name: KilledShape(f"{_EXACT_NUMBERS}{KILLED[name].above}", KILLED[name].cell)
    for name in (
        "a flat loop",
        "a function with epochs",
        "a class with fit()",
        "early stopping",
        "schedulers of several kinds",
        "zip of two loaders",
        "clipping and its own accumulation",
        "the best model is a copy",
    )
}
"""Shapes in fp64 without random numbers in a step, which end as well in other numbers of ranks."""
