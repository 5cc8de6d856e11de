"""A loop that is resumed sees what it would have seen, and nothing twice."""

from __future__ import annotations

import itertools
import json
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch.utils.data import DataLoader, Dataset, IterableDataset

from nbaccel import Accelerator
from nbaccel.testing import run_ranks
from nbaccel.train.data import DataLoaderConfiguration


class Squares(Dataset[int]):
    """Notes what is read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> int:
        self.read.append(index)
        return index


class NoisySquares(Squares):
    """Its samples are drawn in the process of the loop, as where pictures are augmented without worker processes."""

    def __getitem__(self, index: int) -> Any:
        return super().__getitem__(index) + torch.rand(()).item() + random.random()


class Stream(IterableDataset[int]):
    """Notes what is read."""

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.read: list[int] = []

    def __iter__(self) -> Iterator[int]:
        for index in range(self.samples):
            self.read.append(index)
            yield index


class StatefulStream(Stream):
    """As `datasets.IterableDataset`: the state is that after the last sample that was handed out."""

    begun = 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.begun = state["at"]

    def __iter__(self) -> Iterator[int]:
        begun, self.begun = self.begun, 0
        for index in range(begun, self.samples):
            self.read.append(index)
            self.at = index + 1
            yield index


def _loader(samples: int, batch_size: int, kind: str, workers: int = 0) -> DataLoader[Any]:
    options: dict[str, Any] = {"num_workers": workers}
    if kind == "own generator":
        options["generator"] = torch.Generator().manual_seed(3)
    streams = {"stream": Stream, "stateful": StatefulStream}
    if kind in streams:
        return DataLoader(streams[kind](samples), batch_size, **options)
    dataset = NoisySquares(samples) if kind == "noisy" else Squares(samples)
    return DataLoader(dataset, batch_size, shuffle=kind != "ordered", **options)


def _noise() -> float:
    """What a training draws in each step, dropout for one."""
    return torch.rand(()).item() + random.random()


def _run(
    kind: str, stop: int, workers: int = 0, configuration: dict[str, Any] | None = None, samples: int = 23
) -> tuple[list[Any], list[Any], list[int], dict[str, Any]]:
    """Two epochs without and with a stop after `stop` batches: batches and noise of both, what the second read."""

    def start(seed: int) -> tuple[Accelerator, Any]:
        torch.manual_seed(seed)
        random.seed(seed)
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**(configuration or {})))
        return accelerator, accelerator.prepare(_loader(samples, 2, kind, workers))

    def epochs(accelerator: Accelerator, loader: Any, count: int) -> Iterator[tuple[list[int], float]]:
        for _ in range(count):
            for batch in loader:
                accelerator.gather(torch.ones(1))
                yield batch.tolist(), _noise()

    accelerator, loader = start(1)
    whole = list(epochs(accelerator, loader, 2))

    accelerator, loader = start(1)
    running = epochs(accelerator, loader, 1)
    before = list(itertools.islice(running, stop))
    state, generators = loader.state_dict(), (torch.get_rng_state(), random.getstate())

    accelerator, loader = start(99)
    loader.load_state_dict(state)
    torch.set_rng_state(generators[0])
    random.setstate(generators[1])
    after = list(epochs(accelerator, loader, 1 if 2 * stop == len(whole) else 2))
    return whole, before + after, loader.dataset.read, state


@pytest.mark.parametrize("kind", ["ordered", "shuffled", "noisy", "own generator", "stream", "stateful"])
@pytest.mark.parametrize("stop", [1, 5, 12])
def test_one_process_goes_on_bit_for_bit(kind: str, stop: int) -> None:
    whole, resumed, read, state = _run(kind, stop)
    assert resumed == whole
    assert state["batches"] == stop
    if kind not in ("stream", "stateful"):
        assert len(read) == 23 - min(2 * stop, 23) + 23  # nothing that was had is read again


@pytest.mark.parametrize(("stop", "begin"), [(5, 0), (20, 12), (31, 23)])
def test_a_dataset_with_a_state_resumes_by_it_a_few_batches_before(stop: int, begin: int) -> None:
    whole, resumed, read, _ = _run("stateful", stop, samples=63)
    assert resumed == whole
    assert len(read) == 63 - 2 * begin + 63
    assert read[0] == 2 * begin


class Buffered(StatefulStream):
    """Shuffles by a buffer, which is not in its state."""

    buffer = 6

    def __iter__(self) -> Iterator[Any]:
        draws, held = random.Random(3), list[int]()
        for index in super().__iter__():
            held.append(index)
            if len(held) == self.buffer:
                yield held.pop(draws.randrange(self.buffer))
        yield from held


class Noisy(StatefulStream):
    """Adds noise that is never the same, as where pictures are augmented, and gives a label."""

    def __iter__(self) -> Iterator[Any]:
        for index in super().__iter__():
            yield index + random.SystemRandom().random(), index


def _resumed_stream(kind: str, dispatch: bool | None, stop: int) -> tuple[list[Any], list[Any], int, list[str]]:
    """Batches of an epoch, and those of a resumption after `stop` that was saved twice; how many samples it read."""
    kinds: dict[str, type[StatefulStream]] = {"buffered": Buffered, "noisy": Noisy}

    def start() -> Any:
        accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatch))
        return accelerator.prepare(DataLoader(kinds[kind](64), 2))

    whole = [_labels(batch) for batch in start()]
    loader = start()
    running = iter(loader)
    before = [_labels(batch) for batch in itertools.islice(running, stop)]
    state = loader.state_dict()
    json.dumps(state["witness"])
    loader = start()
    loader.load_state_dict(state)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        running = iter(loader)
        before.append(_labels(next(running)))
        state = loader.state_dict()  # again, with few batches since
        read = len(loader.dataset.read)
        loader = start()
        loader.load_state_dict(state)
        after = [_labels(batch) for batch in loader]
    return whole, before + after, read, [str(each.message) for each in caught]


def _labels(batch: Any) -> list[int]:
    labels: list[int] = (batch[1] if isinstance(batch, list) else batch).tolist()
    return labels


@pytest.mark.parametrize(("ranks", "dispatch"), [(1, None), (2, None), (2, False)])
def test_the_state_of_a_stream_counts_only_if_it_leads_to_the_batches_before_the_save(
    ranks: int, dispatch: bool | None
) -> None:
    for rank, (whole, resumed, read, said) in enumerate(run_ranks(ranks, _resumed_stream, "buffered", dispatch, 12)):
        assert resumed == whole
        if rank == 0 or dispatch is False:
            assert read > 2 * 12 * ranks
            assert len(said) == 2
            assert "the state of Buffered does not lead back to the batches before the save" in said[0]
            assert f"all {12 * ranks} batches up to there are read again" in said[0]


def test_a_state_that_leads_to_the_same_labels_counts_whatever_noise_is_added() -> None:
    for whole, resumed, read, said in run_ranks(1, _resumed_stream, "noisy", None, 20):
        assert resumed == whole
        assert not said
        assert read <= 2 * 10 + 2


def test_worker_processes_resume_too() -> None:
    for kind in ("shuffled", "stream"):
        whole, resumed, _, _ = _run(kind, 3, workers=2)
        assert resumed == whole


@pytest.mark.parametrize(
    "configuration", [{"use_seedable_sampler": True}, {"use_seedable_sampler": True, "data_seed": 3}]
)
def test_a_seedable_order_is_resumed(configuration: dict[str, Any]) -> None:
    whole, resumed, read, _ = _run("shuffled", 4, configuration=configuration)
    assert resumed == whole
    assert len(read) == 23 - 8 + 23


@pytest.mark.parametrize(
    ("kind", "configuration"),
    [
        ("ordered", {}),
        ("shuffled", {}),
        ("shuffled", {"split_batches": True}),
        ("shuffled", {"dispatch_batches": True}),
        ("stream", {}),
        ("stream", {"dispatch_batches": False}),
        ("stateful", {}),
        ("stateful", {"dispatch_batches": False}),
    ],
    ids=str,
)
@pytest.mark.parametrize("stop", [1, 4])
def test_two_ranks_go_on_bit_for_bit(kind: str, configuration: dict[str, Any], stop: int) -> None:
    # A stream that resumes by its state does not read the samples again that fill the last round up.
    samples = 24 if kind == "stateful" else 23
    for rank, (whole, resumed, _, state) in enumerate(run_ranks(2, _run, kind, stop, 0, configuration, samples)):
        if rank == 0:
            assert resumed == whole
        assert [ids for ids, _ in resumed] == [ids for ids, _ in whole]
        assert state["batches"] == stop * (1 if "split_batches" in configuration else 2)


@settings(deadline=None, max_examples=12)
@given(
    before=st.integers(1, 3),
    after=st.integers(1, 3),
    stop=st.integers(1, 7),
)
def test_any_number_of_ranks_goes_on_with_the_samples_that_are_left(before: int, after: int, stop: int) -> None:
    def in_ranks() -> tuple[list[int], dict[str, Any]]:
        loader = _seedable()
        running = iter(loader)
        seen = [index for batch in itertools.islice(running, stop) for index in batch.tolist()]
        return seen, loader.state_dict()

    first = run_ranks(before, in_ranks)
    state = first[0][1]

    def resumed() -> list[int]:
        loader = _seedable()
        loader.load_state_dict(state)
        return [index for batch in loader for index in batch.tolist()]

    seen = [index for ids, _ in first for index in ids]
    seen += [index for ids in run_ranks(after, resumed) for index in ids]
    missing, twice = set(range(48)) - set(seen), len(seen) - 48
    assert not missing
    assert twice <= 2 * (before - 1) + 2 * (after - 1)  # they fill up a last round


def _seedable(batch_size: int = 2) -> Any:
    configuration = DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1)
    loader: DataLoader[Any] = DataLoader(range(48), batch_size, shuffle=True)  # type: ignore[arg-type]
    return Accelerator(dataloader_config=configuration).prepare(loader)


def _state_after(batches: int, batch_size: int = 2) -> dict[str, Any]:
    loader = _seedable(batch_size)
    running = iter(loader)
    for _ in range(batches):
        next(running)
    state: dict[str, Any] = loader.state_dict()
    return state


def test_another_batch_size_goes_on_after_the_same_samples() -> None:
    whole = [index for batch in _seedable() for index in batch.tolist()]
    loader = _seedable(batch_size=4)
    loader.load_state_dict(_state_after(6))
    assert [index for batch in loader for index in batch.tolist()] == whole[12:]


def test_a_position_inside_a_batch_is_an_error_with_the_numbers() -> None:
    with pytest.raises(ValueError, match=r"5 batches of 2 = 10 samples into epoch 0, .* of 4\. .*divides 10"):
        _seedable(batch_size=4).load_state_dict(_state_after(5))


def _at_its_end() -> tuple[Any, list[int]]:
    """A loader with the state of another one that was saved with its last batch, and the order of the next epoch."""
    loader = _seedable()
    for _ in loader:
        state = loader.state_dict()
    second = [index for batch in loader for index in batch.tolist()]
    loader = _seedable()
    loader.load_state_dict(state)
    assert (state["batches"], state["is_over"], len(loader)) == (24, True, 24)
    return loader, second


def test_a_position_at_the_end_of_an_epoch_is_the_beginning_of_the_next_one() -> None:
    loader, second = _at_its_end()
    assert loader.iteration == 1
    assert [index for batch in loader for index in batch.tolist()] == second
    assert (loader.iteration, len(list(loader))) == (2, 24)


@pytest.mark.parametrize("skip", [0, 3])
def test_what_is_skipped_at_the_end_of_an_epoch_is_of_the_next_one(skip: int) -> None:
    loader, second = _at_its_end()
    rest = Accelerator().skip_first_batches(loader, skip)
    assert [index for batch in rest for index in batch.tolist()] == second[2 * skip :]
    assert loader.iteration == 2


def test_a_whole_epoch_that_is_skipped_at_its_end_is_that_epoch() -> None:
    loader, second = _at_its_end()
    assert list(Accelerator().skip_first_batches(loader, 24)) == []
    assert [index for batch in loader for index in batch.tolist()] == second


@pytest.mark.parametrize("named", [0, 1])
def test_an_epoch_that_is_named_is_the_one_that_comes(named: int) -> None:
    loader, second = _at_its_end()
    loader.set_epoch(named)
    if named == 0:
        assert list(loader) == []
    assert [index for batch in loader for index in batch.tolist()] == second


def test_an_epoch_that_was_named_once_is_not_named_by_later_positions() -> None:
    loader = _seedable()
    loader.load_state_dict(_state_after(3))
    loader.set_epoch(0)
    for _ in loader:
        state = loader.state_dict()
    loader = _seedable()
    loader.load_state_dict(state)
    assert (state["batches"], loader.iteration, len(list(loader))) == (24, 1, 24)


def test_an_epoch_that_is_over_may_have_any_batch_size() -> None:
    loader: DataLoader[Any] = DataLoader(range(10), 4)  # type: ignore[arg-type]
    prepared = Accelerator().prepare(loader)
    for _ in prepared:
        state = prepared.state_dict()
    again = Accelerator().prepare(DataLoader(range(10), 5))  # type: ignore[arg-type, var-annotated]
    again.load_state_dict(state)
    assert (again.iteration, len(list(again))) == (1, 2)


def test_a_generator_of_the_loaders_own_goes_on_between_epochs() -> None:
    def start() -> Any:
        return Accelerator().prepare(_loader(23, 2, "own generator"))

    loader = start()
    list(loader)
    state = loader.state_dict()
    second = [batch.tolist() for batch in loader]
    loader = start()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == second


def test_outside_of_a_loop_the_position_is_the_next_epochs_beginning() -> None:
    loader = _seedable()
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (0, 0)
    list(loader)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (1, 0)


def test_a_position_that_nobody_has_used_yet_is_kept() -> None:
    state = _state_after(3)
    loader = _seedable()
    loader.load_state_dict(state)
    again = loader.state_dict()
    assert (again["epoch"], again["batches"]) == (0, 3)
    loader.set_epoch(4)
    assert (loader.state_dict()["epoch"], loader.state_dict()["batches"]) == (4, 0)


def test_batches_of_an_open_window_can_be_left_to_be_seen_again() -> None:
    for kind, samples in (("ordered", 12), ("stateful", 12)):
        loader = Accelerator(gradient_accumulation_steps=4).prepare(_loader(samples, 1, kind))
        running = iter(loader)
        for _ in range(6):
            next(running)
            loader.accumulation.window.advance(4)
        state = loader.state_dict(unseen=2)
        running.close()
        loader.load_state_dict(state)
        assert [batch.item() for batch in loader] == list(range(4, 12))


def test_a_window_that_began_in_the_epoch_before_goes_back_to_this_epochs_beginning() -> None:
    loader = _seedable()
    running = iter(loader)
    next(running)
    assert loader.state_dict(unseen=3)["batches"] == 0


def _worker_numbers() -> list[float]:
    """What a dataset draws in worker processes after a resumption."""

    class Noise(Dataset[float]):
        def __len__(self) -> int:
            return 16

        def __getitem__(self, index: int) -> float:
            return torch.rand(()).item()

    accelerator = Accelerator()
    torch.manual_seed(accelerator.process_index)
    loader = accelerator.prepare(DataLoader(Noise(), 2, num_workers=1))
    running = iter(loader)
    next(running)
    state = accelerator.collectives.gather_objects([loader.state_dict()])[0]  # rank 0's, as a checkpoint has it
    running.close()
    loader.load_state_dict(state)
    return [value for batch in loader for value in batch.tolist()]


def test_worker_processes_of_different_ranks_draw_different_numbers_after_a_resumption() -> None:
    first, second = run_ranks(2, _worker_numbers)
    assert not set(first) & set(second)


def test_a_state_holds_numbers_texts_and_tensors_only() -> None:
    state = _run("shuffled", 2)[3]
    tensors = state.pop("order")
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())
    json.dumps(state)


def _hugging_face(dispatch: bool | None) -> tuple[list[Any], list[Any], list[int]]:
    """Three epochs of a stream that shuffles by the epoch: whole, and with a stop after 12 batches; what is read."""
    datasets = pytest.importorskip("datasets")
    read: list[int] = []

    def note(sample: dict[str, Any]) -> dict[str, Any]:
        read.append(sample["id"])
        return sample

    def start() -> tuple[Accelerator, Any]:
        stream = datasets.Dataset.from_dict({"id": list(range(80))}).to_iterable_dataset().map(note)
        configuration = DataLoaderConfiguration(dispatch_batches=dispatch)
        accelerator = Accelerator(dataloader_config=configuration)
        return accelerator, accelerator.prepare(DataLoader(stream, 2))

    def epochs(accelerator: Accelerator, loader: Any, count: int) -> Iterator[list[int]]:
        for _ in range(count):
            for batch in loader:
                accelerator.wait_for_everyone()
                yield batch["id"].tolist()

    whole = list(epochs(*start(), 3))
    accelerator, loader = start()
    running = epochs(accelerator, loader, 1)
    before = [next(running) for _ in range(12)]
    state = loader.state_dict()
    accelerator, loader = start()
    loader.load_state_dict(state)
    read.clear()
    after = list(epochs(accelerator, loader, 3))
    return whole, before + after, read[:1]


@pytest.mark.parametrize(("ranks", "dispatch"), [(1, None), (2, None), (2, False)])
def test_streams_of_hugging_face_resume_by_their_state(ranks: int, dispatch: bool | None) -> None:
    pytest.importorskip("datasets")
    for rank, (whole, resumed, first_read) in enumerate(run_ranks(ranks, _hugging_face, dispatch)):
        assert resumed == whole
        assert first_read == ([] if rank and dispatch is None else [2 * (12 * ranks - 8)])


def _in_order(accelerator: Accelerator, loader: Any) -> list[int]:
    """This rank's ids of an iteration in which the ranks meet."""
    seen = []
    for batch in loader:
        accelerator.gather(torch.ones(1))
        seen += batch.tolist()
    return seen


def _begun_often(way: str, state: dict[str, Any] | None) -> tuple[list[int], dict[str, Any], list[list[int]]]:
    """Four batches of a loop that comes after others; or the rest of it, once `state` was loaded and looked at."""
    accelerator = Accelerator()
    loader = accelerator.prepare(DataLoader(range(48), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
    if state is not None:
        loader.load_state_dict(state)
    if way == "break":
        for _ in loader:
            break
    elif way == "peek by all":
        next(iter(loader))
    elif way == "peek by rank 0":
        if accelerator.is_main_process:
            next(iter(loader))
    elif way == "without gradients" and state is None:
        with torch.no_grad():
            list(loader)
    elif way == "whole loop" and state is None:
        list(loader)
    seen: list[int] = []
    for batch in loader:
        accelerator.gather(torch.ones(1))
        seen += batch.tolist()
        if state is None and len(seen) == 8:
            state = loader.state_dict()
            next(iter(loader))  # a look inside changes nothing
            assert loader.state_dict() == state
    assert state is not None
    return seen, state, [_in_order(accelerator, loader), next(iter(loader)).tolist()]


@pytest.mark.parametrize("way", ["peek by rank 0", "peek by all", "break", "whole loop", "without gradients"])
def test_an_epoch_that_was_begun_before_goes_on_in_the_order_that_was_read(way: str) -> None:
    whole = run_ranks(2, _begun_often, way, None)
    state = whole[0][1]
    rest = run_ranks(2, _begun_often, way, state)
    for (seen, _, later), (resumed, _, resumed_later) in zip(whole, rest, strict=True):
        assert resumed == seen[8:]
        assert resumed_later == later
    assert sorted(index for seen, *_ in whole for index in seen) == list(range(48))


def test_an_evaluation_that_comes_again_has_the_order_that_it_had() -> None:
    def in_rank(state: dict[str, Any] | None) -> tuple[list[int], dict[str, Any]]:
        loader = Accelerator().prepare(DataLoader(range(16), 2, shuffle=True))  # type: ignore[arg-type, var-annotated]
        if state is not None:
            loader.load_state_dict(state)
        with torch.no_grad():
            if state is None:
                list(loader)
                list(loader)
            seen: list[int] = []
            for batch in loader:
                seen += batch.tolist()
                state = state or loader.state_in_epoch(0, 0)
        assert state is not None
        return seen, state

    first = run_ranks(2, in_rank, None)
    assert [seen for seen, _ in run_ranks(2, in_rank, first[0][1])] == [seen for seen, _ in first]


def test_a_loop_that_was_begun_before_goes_on_in_another_number_of_ranks() -> None:
    loader = _seedable()
    for _ in loader:
        break
    seen: list[int] = []
    for batch in loader:
        seen += batch.tolist()
        if len(seen) == 8:
            state = loader.state_dict()
            break

    def rest() -> list[int]:
        loader = _seedable()
        loader.load_state_dict(state)
        if loader.world.is_main_process:
            next(iter(loader))
        return [index for batch in loader for index in batch.tolist()]

    assert sorted(seen + [index for ids in run_ranks(2, rest) for index in ids]) == list(range(48))


def test_a_state_of_before_loops_and_looks_were_counted_is_still_read() -> None:
    loader = _seedable()
    running = iter(loader)
    first = next(running)
    state = {name: value for name, value in loader.state_dict().items() if name not in ("loops", "looks", "is_look")}
    rest = list(running)
    loader = _seedable()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == [batch.tolist() for batch in rest]
    assert first.tolist() not in [batch.tolist() for batch in rest]


def test_a_look_at_a_loop_that_is_through_sees_a_batch_and_leaves_the_loop_through() -> None:
    loader = _seedable()
    for _ in loader:
        state = loader.state_dict()
    loader = _seedable()
    loader.load_state_dict(state)
    with torch.no_grad():
        assert len(next(iter(loader))) == 2
        assert len(list(loader)) == 24
    loader.set_epoch(0)
    assert list(loader) == []
    assert len(list(loader)) == 24
