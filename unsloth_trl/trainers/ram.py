"""What the trainers say about host memory before the first step."""

from accelerate.logging import get_logger

from ..patches.checkpointing.policy import Plan
from ..patches.checkpointing.ram import SWAP_IN_USE, HostMemory, host_memory


logger = get_logger(__name__)


def host_memory_findings(memory: HostMemory, max_pinned_gb: float | None) -> list[str]:
    """
    What is wrong with the host's memory for offloaded layer inputs, one line of advice each.

    Args:
        memory (`HostMemory`): What there is.
        max_pinned_gb (`float`, *optional*): The user's limit in GiB.
    """
    found = []
    available = memory.available / 2**30
    if memory.swap_used > SWAP_IN_USE:
        found.append(
            f"{memory.swap_used / 2**30:.1f} GiB are swapped out: page-locked memory makes that worse. Close other "
            "programs, or lower max_pinned_gb."
        )
    if max_pinned_gb is not None and max_pinned_gb > 0.9 * available:
        where = "this container has" if memory.container else "the machine has"
        found.append(
            f"max_pinned_gb={max_pinned_gb:g} is more than nine tenths of the {available:.1f} GiB that {where} left: "
            f"the operating system may end the run. Set at most {0.5 * available:.1f}."
        )
    return found


def warn_of_host_memory(plan: Plan) -> None:
    """Log the findings, if the plan can offload at all."""
    if plan.policy in ("auto", "offload"):
        for line in host_memory_findings(host_memory(), plan.max_pinned_gb):
            logger.warning(line)
