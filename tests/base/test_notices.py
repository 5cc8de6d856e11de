"""Frames of this package are known by its folder, wherever its files move."""

from __future__ import annotations

import os
import warnings

import pytest

from environments import REPOSITORY
from nbaccel.base.notices import PACKAGE_DIR, unignored
from nbaccel.launching.ipc.user_code import is_users


def test_every_file_of_the_package_is_ours_and_a_notebooks_is_not() -> None:
    files = [str(path) for path in (REPOSITORY / "nbaccel").rglob("*.py")]
    assert len(files) > 200
    assert all(file.startswith(PACKAGE_DIR) and not is_users(file) for file in files)
    assert is_users(os.path.join(os.path.dirname(PACKAGE_DIR.rstrip(os.sep)), "nbaccel_of_mine", "train.py"))
    assert is_users("/tmp/ipykernel_7/1234.py")


@pytest.mark.parametrize(
    "file", ["/root/.local/lib/python3.11/site-packages/timm/x.py", "/usr/lib/python3/dist-packages/yaml/__init__.py"]
)
def test_a_package_is_a_library_wherever_it_was_installed(file: str) -> None:
    assert not is_users(file)
    assert not is_users(os.__file__)
    assert is_users(f"/home/me/my-{file.split('/')[-3]}/train.py")


def test_a_blanket_filter_hides_no_notice_and_a_narrow_one_does() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with unignored(), pytest.warns(UserWarning, match="heard"):
            warnings.warn("heard", stacklevel=1)
        warnings.filterwarnings("ignore", message="quiet")
        with warnings.catch_warnings(record=True) as seen, unignored():
            warnings.warn("quiet", stacklevel=1)
        assert seen == []
