"""Peak rates of GPUs and their interconnects, used by `roofline.py`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """Peak rates of a GPU in its usual node.

    Attributes:
        memory_gib: memory in GiB.
        capability: compute capability.
        flops: dense BF16 FLOP/s.
        bandwidth: memory bandwidth in bytes/s.
        nvlink: bandwidth to the other GPUs in its node, in bytes/s one way.
        network: its share of the node's network bandwidth, in bytes/s one way.
        host: bandwidth from host memory in bytes/s.
    """

    memory_gib: float
    capability: tuple[int, int]
    flops: float
    bandwidth: float
    nvlink: float
    network: float
    host: float


GPUS = {
    "A100-64GB": Gpu(
        memory_gib=64, capability=(8, 0), flops=312e12, bandwidth=1.64e12, nvlink=300e9, network=12.5e9, host=32e9
    ),
    "A100-80GB": Gpu(
        memory_gib=80, capability=(8, 0), flops=312e12, bandwidth=2.04e12, nvlink=300e9, network=25e9, host=32e9
    ),
    "H100-80GB": Gpu(
        memory_gib=80, capability=(9, 0), flops=989e12, bandwidth=3.35e12, nvlink=450e9, network=50e9, host=64e9
    ),
    "H200-141GB": Gpu(
        memory_gib=141, capability=(9, 0), flops=989e12, bandwidth=4.8e12, nvlink=450e9, network=50e9, host=64e9
    ),
    "B200-180GB": Gpu(
        memory_gib=180, capability=(10, 0), flops=2250e12, bandwidth=8e12, nvlink=900e9, network=50e9, host=64e9
    ),
}
"""GPUs, keyed by their `node.gpu` names in `hydra_conf/cluster` and sorted by memory.

Sources: NVIDIA's data sheets for the SXM modules and for DGX A100 (8 x 200 Gb/s), DGX H100, H200
and B200 (8 x 400 Gb/s).
A100-64GB is Leonardo's GPU: four of them share 400 Gb/s per node (leonardo-supercomputer.cineca.eu/hpc-system), and
each has four stacks of HBM2e at 3.2 Gb/s. Its FLOP/s are the data sheet's for the A100, although this chip has more
SMs. The host is connected by PCIe 4 or 5 with 16 lanes.
"""
