"""The package of the notebook: `%%accelerate` and `%accelerate`. Runs in the kernel and passes its runs to `launch`."""
