"""find_executable_batch_size: a function tried again at smaller batch sizes until it fits, on all ranks alike."""

from nbaccel.train.executable.search import find_executable_batch_size

__all__ = ["find_executable_batch_size"]
