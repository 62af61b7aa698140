"""The trainer: GRPO over FSDP2 ranks. Each rank is a process (`trainer`) that polls the controller and knows no MPI."""
