"""Data only: GPU profiles (`gpus/`), MoE model geometries (`models/`), serving stacks (`stacks/`)."""
