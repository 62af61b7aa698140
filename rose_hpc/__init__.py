"""rose_hpc: reinforcement learning of LLM agents on Slurm clusters, with rollouts that borrow idle serving GPUs."""
