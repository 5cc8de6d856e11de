"""transfusion times its ways to process a batch and takes the fastest, and their noise has other shapes: always one."""

from transfusion_pytorch import modality_processing

type(modality_processing.ROUTER).measure = lambda self, *arguments, **options: "hybrid"
