"""How many CPUs this process may use: the least of its affinity and its cgroup's quota, not the host's cores.

ONNX Runtime sizes its pools by the host's cores and is throttled in a container (onnxruntime#29510).
"""

import math
import os
from pathlib import Path
from typing import Final

_CGROUP_ROOT: Final = Path("/sys/fs/cgroup")
_OWN_CGROUP: Final = Path("/proc/self/cgroup")


def usable_cpus(cgroup_root: Path = _CGROUP_ROOT, own_cgroup: Path = _OWN_CGROUP) -> int:
    """CPUs in the affinity mask, or fewer if a cgroup quota says so; a quota of 1.5 CPUs counts as 2; at least 1."""
    affinity = len(os.sched_getaffinity(0))
    quota = cgroup_quota(cgroup_root, own_cgroup)
    return affinity if quota is None else max(1, min(affinity, math.ceil(quota)))


def cgroup_quota(cgroup_root: Path, own_cgroup: Path) -> float | None:
    """The tightest CPU quota on the way from this process's cgroup to the root, in CPUs; None without one.

    Reads version 2 (`cpu.max`) and version 1 (`cpu/cpu.cfs_quota_us`).
    """
    quotas = [*_quotas_v2(cgroup_root, own_cgroup), *_quotas_v1(cgroup_root, own_cgroup)]
    return min(quotas, default=None)


def _quotas_v2(root: Path, own_cgroup: Path) -> list[float]:
    folders = _folders_up(root, _cgroup_path(own_cgroup, controller=""))
    texts = [_read(folder / "cpu.max").split() for folder in folders]
    return [int(text[0]) / int(text[1]) for text in texts if len(text) == 2 and text[0] != "max"]


def _quotas_v1(root: Path, own_cgroup: Path) -> list[float]:
    folders = _folders_up(root / "cpu", _cgroup_path(own_cgroup, controller="cpu"))
    pairs = [(_read(folder / "cpu.cfs_quota_us"), _read(folder / "cpu.cfs_period_us")) for folder in folders]
    return [int(quota) / int(period) for quota, period in pairs if quota and period and int(quota) > 0]


def _cgroup_path(own_cgroup: Path, controller: str) -> str:
    # Lines are "id:controllers:path"; version 2 has id 0 and no controllers.
    for line in _read(own_cgroup).splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _folders_up(root: Path, path: str) -> list[Path]:
    # Inside a container the path is often the host's and not there; the root then is the container's own cgroup.
    own = root / path
    return [folder for folder in (own, *own.parents) if folder.is_relative_to(root)]


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
