"""Checkpoints: a training in a folder that is either complete or absent, and whose damage is detected. In ranks.

    checkpoint_3/
      model.safetensors  model.json          weights under their own names; parts of a state dict that are no tensors
      model.frozen.safetensors               weights that need no gradient, if any; checkpoints share this file
      optimizer.json     optimizer.safetensors     structure, and tensors by dotted name; scheduler, custom_0 alike
      training.json                          step, seed, gradient scaler, positions of loaders
      model-rank00000-of-00002.safetensors   rows of a sharded model that rank 0 held; one file of each rank, of the
                                             optimizer's state too, and the manifest says which box is in which file
      generators_0.json  generators_1.json   random states, one sealed file per rank
      manifest.json                          written last: size and CRC32 of every file, and where the training stood

Nothing in it is a pickle, unless a registered object's state is more than data. Other files in it are those of the
program's hooks. From bottom to top: `manifest` (the file that makes a folder a checkpoint), `serialization` (states to
files), `atomic_folder` (complete or absent), `shards` (a rank's rows of a sharded tensor), `save_agreement` (how the
ranks that write them agree), `generators` and `rng_files` (random states, and their files), `hook_files` (what hooks of
other ranks write), `content` (the states in a checkpoint), `directory` (names, choice, limits), `training_state`,
`writer`, `manager` and `resume` (parts of an Accelerator), `autosave`. `model_weights` is the other format, one model
for Hugging Face's libraries. Accelerate's folders: `nbaccel/features/accelerate_checkpoints`.

Imports `base`, other folders of `train`, and the table of `features`.
"""
