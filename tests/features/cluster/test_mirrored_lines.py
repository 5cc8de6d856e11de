"""A list of the ranks of all nodes: each node has a file of its own, and the lines of the others."""

from __future__ import annotations

from pathlib import Path

from nbaccel.features.cluster.mirrored_lines import MirroredLines


def append(path: Path, text: bytes) -> None:
    with path.open("ab") as file:
        file.write(text)


def test_lines_of_other_nodes_are_not_told_to_them_again(tmp_path: Path) -> None:
    path = tmp_path / "files"
    lines = MirroredLines(str(path))
    assert lines.news() == b""
    append(path, b"own 1\n")
    lines.add(b"other 1\nother 2\n")
    append(path, b"own 2\nhalf of ")
    assert lines.news() == b"own 1\nown 2\n"
    append(path, b"a line\n")
    lines.add(b"other 3\n")
    lines.add(b"other 4\n")
    append(path, b"own 3\n")
    assert lines.news() == b"half of a line\nown 3\n"
    assert lines.news() == b""
    assert path.read_text().splitlines() == [
        *("own 1", "other 1", "other 2", "own 2", "half of a line", "other 3", "other 4", "own 3"),
    ]


def test_two_nodes_end_with_the_same_lines(tmp_path: Path) -> None:
    paths = [tmp_path / "east", tmp_path / "west"]
    nodes = [MirroredLines(str(path)) for path in paths]
    for number in range(20):
        append(paths[number % 2], f"{number}\n".encode())
        if number % 3 == 0:
            for here, there in ((0, 1), (1, 0)):
                if news := nodes[here].news():
                    nodes[there].add(news)
    for here, there in ((0, 1), (1, 0)):
        if news := nodes[here].news():
            nodes[there].add(news)
    assert sorted(paths[0].read_text().split(), key=int) == [str(number) for number in range(20)]
    assert sorted(paths[1].read_text().split(), key=int) == [str(number) for number in range(20)]
