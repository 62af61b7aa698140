"""The trainer of the chaos test: a process that changes a tiny Qwen3 from version to version and publishes it when told to.

    python chaos_trainer.py CONTROL_DIR ARENA SEED BUCKET_BYTES RETAINED

Each version's change depends on (seed, version) only, so that the test can make the same model and know what must have arrived.
"""

import random
import sys
import time
from pathlib import Path

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from rose_hpc.control import WorkerChannel
from rose_hpc.lifeline import die_with_parent
from rose_hpc.messages import VersionWritten, WorkerUp
from rose_hpc.weights.publisher import WeightPublisher

VOCABULARY = 64
DENSITIES = (0.001, 0.003, 0.01, 0.01, 0.05, 1.0)


def make_policy(seed):
    """About 0.4 M parameters in bfloat16."""
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        initializer_range=0.15,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(config).bfloat16().eval()


@torch.no_grad()
def train(policy, seed, version):
    """A step to this version: some elements, now and then all of them, move to a neighbouring bit pattern."""
    density = random.Random(f"{seed}/{version}").choice(DENSITIES)
    generator = torch.Generator().manual_seed(1000 * seed + version)
    for parameter in policy.parameters():
        bits = parameter.data.view(torch.int16).view(-1)
        chosen = torch.rand(bits.shape, generator=generator) < density
        bits[chosen] += torch.randint(0, 2, (int(chosen.sum()),), generator=generator).to(torch.int16) * 2 - 1


def main(control_dir, arena, seed, bucket_bytes, retained):
    die_with_parent()
    torch.set_num_threads(1)
    policy = make_policy(seed)
    publisher = WeightPublisher(policy, arena, bucket_bytes=bucket_bytes, retained_versions=retained)

    def publish(command):
        if command.version > 0:
            train(policy, seed, command.version)
        begin_s = time.monotonic()
        shard = publisher.publish(command.version)
        wrote_s = time.monotonic() - begin_s
        return VersionWritten(command.version, shard.digest, shard.shard_bytes, wrote_s, shard.base, dict(shard.stream_bytes))

    channel = WorkerChannel(control_dir, "trainer-0", 10.0)
    channel.hello(WorkerUp(world_size=1))
    channel.serve(publish)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), *map(int, sys.argv[3:]))
