"""What is known of GPUs without asking their driver."""

from __future__ import annotations

from pathlib import Path

from nbaccel.gpu_driver import cuda_environ, has_gpu_driver


def test_a_driver_is_seen_by_its_device(tmp_path: Path) -> None:
    assert not has_gpu_driver(tmp_path)
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidiactl").touch()
    assert has_gpu_driver(tmp_path)


def test_only_the_variables_of_cuda_are_kept() -> None:
    told = {"CUDA_VISIBLE_DEVICES": "1", "SECRET": "x", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert cuda_environ(told) == (("CUDA_VISIBLE_DEVICES", "1"), ("CUDA_DEVICE_ORDER", "PCI_BUS_ID"))
