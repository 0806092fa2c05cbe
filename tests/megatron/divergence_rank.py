"""A rank of test_distillation.py: its part of the vocabulary has its part of the divergence and gradient.

    torchrun --nproc-per-node 2 divergence_rank.py FOLDER

FOLDER/tensors.pt has student, teacher, weights, and cases of top_k, temperature, divergence and gradient.
"""

import sys
from pathlib import Path

import torch

from nemo_ext.megatron import divergence
from nemo_ext.megatron.divergence import kl_divergence


def main(folder: Path) -> None:
    torch.distributed.init_process_group("gloo")
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    saved = torch.load(folder / "tensors.pt")
    divergence._AT_ONCE = saved["student"].shape[-1]  # parts of two tokens, as two ranks share the vocabulary
    for top_k, temperature, kl, gradient in saved["cases"]:
        student, teacher = (saved[name].chunk(2, -1)[rank].clone().requires_grad_() for name in ("student", "teacher"))
        got = kl_divergence(student, teacher, temperature=temperature, top_k=top_k, group=group)
        torch.testing.assert_close(got, kl)
        (got * saved["weights"]).sum().backward()
        torch.testing.assert_close(student.grad, gradient.chunk(2, -1)[rank])
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
