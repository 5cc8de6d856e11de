"""The room of the notebook: `%%accelerate` and `%accelerate`. Runs in the kernel and hands its runs to `launch`."""
