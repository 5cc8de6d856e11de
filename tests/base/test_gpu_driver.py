"""What is known of GPUs without asking their driver."""

from __future__ import annotations

from pathlib import Path

from nbaccel.base.gpu_driver import cuda_environ, has_gpu_driver, has_nvidia_driver
from nbaccel.base.gpu_holders import is_holder


def test_a_driver_is_seen_by_its_device(tmp_path: Path) -> None:
    assert not has_gpu_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert has_gpu_driver(tmp_path)


def test_only_the_variables_of_cuda_are_kept() -> None:
    told = {"CUDA_VISIBLE_DEVICES": "1", "SECRET": "x", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert cuda_environ(told) == (("CUDA_VISIBLE_DEVICES", "1"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"))


def test_windows_gives_a_device_to_every_maker_and_a_library_to_nvidia_alone(tmp_path: Path) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/dxg").touch()
    assert has_gpu_driver(tmp_path)
    assert not has_nvidia_driver(tmp_path)
    (tmp_path / "usr/lib/wsl/lib").mkdir(parents=True)
    (tmp_path / "usr/lib/wsl/lib/libcuda.so.1").touch()
    assert has_nvidia_driver(tmp_path)


def test_in_a_container_a_holder_is_who_has_cudas_device_open(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026532201]")
    for pid, opened in {7: ["/dev/nvidia0", "/dev/nvidia-uvm"], 8: ["/dev/null", "/dev/nvidiactl"]}.items():
        (tmp_path / f"proc/{pid}/fd").mkdir(parents=True)
        for number, path in enumerate(opened):
            (tmp_path / f"proc/{pid}/fd/{number}").symlink_to(path)
    assert [is_holder(pid, tmp_path) for pid in (7, 8, 9)] == [True, False, False]


def test_outside_of_containers_the_driver_counts_processes_as_we_do(tmp_path: Path) -> None:
    (tmp_path / "proc/self/ns").mkdir(parents=True)
    (tmp_path / "proc/self/ns/pid").symlink_to("pid:[4026531836]")
    assert is_holder(9, tmp_path)
