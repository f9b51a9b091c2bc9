"""CPUs granted, read from trees that look like the kernel's. Quotas and periods are in microseconds."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from service.cpus import cgroup_quota, usable_cpus

Tree = Callable[[Mapping[str, str], str], tuple[Path, Path]]


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    """Makes a cgroup file system of these files, and a /proc/self/cgroup with this text."""

    def make(files: Mapping[str, str], own: str) -> tuple[Path, Path]:
        root, own_cgroup = tmp_path / "cgroup", tmp_path / "self"
        root.mkdir()
        own_cgroup.write_text(own)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text + "\n")
        return root, own_cgroup

    return make


QUOTAS = [
    pytest.param({"cpu.max": "300000 100000"}, "0::/\n", 3.0, id="v2_container_root"),
    pytest.param({"pod/app/cpu.max": "150000 100000"}, "0::/pod/app\n", 1.5, id="v2_fraction"),
    pytest.param({"pod/app/cpu.max": "50000 20000"}, "0::/pod/app\n", 2.5, id="v2_other_period"),
    pytest.param(
        {"cpu.max": "max 100000", "pod/cpu.max": "200000 100000", "pod/app/cpu.max": "700000 100000"},
        "0::/pod/app\n",
        2.0,
        id="v2_parent_is_tighter",
    ),
    pytest.param(
        {"pod/cpu.max": "700000 100000", "pod/app/cpu.max": "200000 100000"},
        "0::/pod/app\n",
        2.0,
        id="v2_child_is_tighter",
    ),
    pytest.param({"pod/cpu.max": "200000 100000"}, "0::/pod/app\n", 2.0, id="v2_own_file_missing"),
    pytest.param({"cpu.max": "200000 100000"}, "0::/of/the/host\n", 2.0, id="v2_path_of_the_host"),
    pytest.param({"other/cpu.max": "100000 100000", "pod/cpu.max": "max 100000"}, "0::/pod\n", None, id="v2_sibling"),
    pytest.param({"cpu.max": "max 100000"}, "0::/\n", None, id="v2_max"),
    pytest.param({"cpu.max": ""}, "0::/\n", None, id="v2_empty"),
    pytest.param(
        {"cpu/pod/cpu.cfs_quota_us": "250000", "cpu/pod/cpu.cfs_period_us": "100000"},
        "3:memory:/pod\n2:cpu,cpuacct:/pod\n",
        2.5,
        id="v1",
    ),
    pytest.param(
        {
            "cpu/pod/cpu.cfs_quota_us": "-1",
            "cpu/pod/cpu.cfs_period_us": "100000",
            "cpu/cpu.cfs_quota_us": "500000",
            "cpu/cpu.cfs_period_us": "100000",
        },
        "2:cpuacct,cpu:/pod\n",
        5.0,
        id="v1_parent",
    ),
    pytest.param(
        {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, "2:cpu:/\n", None, id="v1_no_limit"
    ),
    pytest.param({"cpu/cpu.cfs_quota_us": "100000"}, "2:cpu:/\n", None, id="v1_no_period"),
    pytest.param(
        {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000", "cpu.max": "300000 100000"},
        "4:cpu:/\n0::/\n",
        1.0,
        id="both_versions",
    ),
    pytest.param({}, "0::/\n", None, id="no_files"),
    pytest.param({}, "", None, id="no_cgroup"),
    pytest.param({"cpu.max": "300000 100000"}, "1:name=systemd:/a:b\n", 3.0, id="colon_in_the_path"),
]


class TestQuota:
    @pytest.mark.parametrize(("files", "own", "want"), QUOTAS)
    def test_is_the_tightest_on_the_way_up(
        self, tree: Tree, files: Mapping[str, str], own: str, want: float | None
    ) -> None:
        """The quota is the least of this cgroup's and its parents', in CPUs; None where nobody set one."""
        assert cgroup_quota(*tree(files, own)) == want

    def test_without_any_cgroup_file(self, tmp_path: Path) -> None:
        """Where the kernel shows no cgroups there is no quota."""
        assert cgroup_quota(tmp_path / "nowhere", tmp_path / "nothing") is None


class TestUsable:
    @pytest.mark.parametrize(
        ("affinity", "quota", "want"),
        [
            pytest.param(7, "max", 7, id="no_quota"),
            pytest.param(7, "300000", 3, id="quota_is_less"),
            pytest.param(2, "300000", 2, id="affinity_is_less"),
            pytest.param(7, "150000", 2, id="fraction_rounds_up"),
            pytest.param(7, "10000", 1, id="at_least_one"),
        ],
    )
    def test_is_the_least_of_affinity_and_quota(
        self, tree: Tree, monkeypatch: pytest.MonkeyPatch, affinity: int, quota: str, want: int
    ) -> None:
        """No more CPUs than the affinity mask has, nor than the quota pays for; at least 1."""
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)))
        assert usable_cpus(*tree({"cpu.max": f"{quota} 100000"}, "0::/\n")) == want

    def test_here(self) -> None:
        """On this machine, it is at least 1 and no more than the affinity mask has."""
        assert 1 <= usable_cpus() <= len(os.sched_getaffinity(0))
