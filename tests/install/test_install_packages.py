"""The node's package manager: allow-listed names only, simulated first, never a removal, locks waited for."""

from __future__ import annotations

import os
import shutil
import threading

import pytest
from install_fakes import DEBIAN, Scripted, StepClock, done

from llmgw.domain.facts import OsFacts
from llmgw.errors import CommandError, PackagesFailed
from llmgw.install.packages import MANAGERS, NodePackages
from llmgw.system.clock import RealClock
from llmgw.system.commands import Completed, RealRunner

ALLOWED = {"libgomp.so.1": {"debian": "libgomp1", "rhel": "libgomp"}, "libz.so.9": {"debian": "libz9-nonesuch"}}
LOCKED = """E: Could not get lock /var/lib/apt/lists/lock. It is held by process 26648 (python3)
E: Unable to lock directory /var/lib/apt/lists/"""
SIMULATED = "Inst libgomp1 (12.2.0-14 Debian:12.5/stable [amd64])\nConf libgomp1 (12.2.0-14 Debian)\n"


def provide(runner: object, missing: tuple[str, ...] = ("libgomp.so.1",), system: OsFacts = DEBIAN, **kwargs: object):
    said: list[str] = []
    clock = StepClock()
    packages = NodePackages(runner, clock, **{"is_root": True, **kwargs})  # type: ignore[arg-type]
    return packages.provide(missing, ALLOWED, system, said.append, threading.Event()), said, clock


def apt(simulate: Completed, install: Completed | None = None, update: Completed | None = None) -> Scripted:
    def answer(argv: tuple[str, ...]) -> Completed:
        if "update" in argv:
            return update or done(0)
        return simulate if "-s" in argv else install or done(0)

    return Scripted(answer)


def test_nothing_is_run_when_nothing_is_missing() -> None:
    runner = apt(done(0))
    assert provide(runner, ())[0] == ()
    assert runner.asked == []


def test_it_is_simulated_and_then_installed_without_recommends_or_upgrades() -> None:
    runner = apt(done(0, SIMULATED))
    names, said, _ = provide(runner)
    assert names == ("libgomp1",)
    assert said == ["installing libgomp1 with apt-get"]
    simulate, install = runner.asked
    assert simulate[-3:] == install[-3:] == ("install", "--", "libgomp1")
    assert "-s" in simulate
    assert {"--no-remove", "--no-upgrade", "--no-install-recommends", "-y"} <= set(install)
    assert runner.env["DEBIAN_FRONTEND"] == "noninteractive"
    assert runner.env["NEEDRESTART_MODE"] == "l"


@pytest.mark.parametrize(
    ("line", "what"),
    [("Remv g++ [4:12.2.0-3]", r"g\+\+"), ("Inst libc6 [2.36-9] (2.41-1 Debian [amd64])", "libc6")],
)
def test_a_removal_or_an_upgrade_is_refused(line: str, what: str) -> None:
    runner = apt(done(0, f"{SIMULATED}{line}\n"))
    with pytest.raises(PackagesFailed, match=f"would remove or upgrade {what}"):
        provide(runner)
    assert len(runner.asked) == 1


def test_stale_lists_are_refreshed_once() -> None:
    answers = iter([done(100, "", "E: Unable to locate package libgomp1"), done(0), done(0, SIMULATED), done(0)])
    runner = Scripted(lambda _: next(answers))
    _, said, _ = provide(runner)
    assert said[0] == "refreshing the package lists with apt-get"
    assert [argv[-1] for argv in runner.asked] == ["libgomp1", "update", "libgomp1", "libgomp1"]


def test_a_package_no_source_has_is_told_in_words() -> None:
    runner = apt(done(100, "", "E: Unable to locate package libgomp1"))
    with pytest.raises(PackagesFailed) as caught:
        provide(runner)
    assert caught.value.message == "libgomp.so.1 is missing and no package source of this node has libgomp1"


def test_a_lock_is_waited_for_with_words() -> None:
    answers = iter([done(0, SIMULATED), done(100, "", LOCKED), done(0)])
    _, said, clock = provide(Scripted(lambda _: next(answers)))
    assert said[-1] == "waiting for process 26648 (python3), which holds the lock of `apt-get`"
    assert clock.waits == [2.0]


def test_a_lock_that_stays_ends_at_the_deadline() -> None:
    with pytest.raises(PackagesFailed, match=r"locked by process 26648 \(python3\) for more than 20 s"):
        provide(apt(done(0, SIMULATED), done(100, "", LOCKED)), lock_deadline_s=20.0)


def test_without_root_the_command_is_named() -> None:
    runner = apt(done(0))
    with pytest.raises(PackagesFailed) as caught:
        provide(runner, is_root=False)
    assert caught.value.words() == "libgomp.so.1 is missing and the agent does not run as root"
    assert caught.value.hint == "run `apt-get install libgomp1` as root"
    assert runner.asked == []


@pytest.mark.parametrize(
    "system",
    [OsFacts("nixos", name="NixOS 24.11"), OsFacts("fedora", name="Silverblue", family="rhel", immutable=True)],
)
def test_a_system_that_takes_no_packages_names_what_is_missing(system: OsFacts) -> None:
    with pytest.raises(PackagesFailed, match=r"^libgomp\.so\.1 is missing and .* takes no packages"):
        provide(apt(done(0)), system=system)


def test_a_library_without_an_allow_listed_package_is_not_searched_for() -> None:
    runner = apt(done(0))
    with pytest.raises(PackagesFailed, match="no package is known to hold it"):
        provide(runner, ("libcuda.so.1",))
    assert runner.asked == []


@pytest.mark.parametrize(
    "name", ["libgomp1-", "libgomp1+", "lib[z]std1", "a=1.0", "./x.deb", "-y", "task^", "a b", "A"]
)
def test_names_that_apt_would_read_as_something_else_are_refused(name: str) -> None:
    packages = NodePackages(apt(done(0)), StepClock(), is_root=True)
    with pytest.raises(PackagesFailed, match="is refused"):
        packages.provide(("l",), {"l": {"debian": name}}, DEBIAN, print, threading.Event())


def test_a_broken_database_names_the_repair() -> None:
    failing = done(100, "", "E: dpkg was interrupted, you must manually run 'dpkg --configure -a'")
    with pytest.raises(PackagesFailed) as caught:
        provide(apt(done(0, SIMULATED), failing))
    assert caught.value.hint == "run `dpkg --configure -a` on this node"


def test_a_missing_package_manager_is_told() -> None:
    def absent(argv: tuple[str, ...]) -> Completed:
        raise CommandError(f"cannot run `{argv[0]}`", cause="No such file or directory")

    with pytest.raises(PackagesFailed, match="cannot run `apt-get`: No such file"):
        provide(Scripted(absent))


def test_other_families_are_asked_in_their_own_way() -> None:
    runner = Scripted(lambda argv: done(1 if "--assumeno" in argv else 0, "Installing:\n libgomp\nOperation aborted."))
    names, _, _ = provide(runner, system=OsFacts("rocky", family="rhel"))
    assert names == ("libgomp",)
    assert [argv[0] for argv in runner.asked] == ["dnf", "dnf"]
    assert set(MANAGERS) == {"debian", "rhel", "suse", "arch", "alpine"}


def test_a_downgrade_by_dnf_is_refused() -> None:
    text = "Installing:\n libgomp\nRemoving dependent packages:\n gcc-c++ 11\nOperation aborted."
    runner = Scripted(lambda _: done(1, text))
    with pytest.raises(PackagesFailed, match=r"would remove or upgrade gcc-c\+\+"):
        provide(runner, system=OsFacts("rocky", family="rhel"))


@pytest.mark.skipif(shutil.which("apt-get") is None or os.geteuid() != 0, reason="needs apt and root")
def test_the_real_apt_says_that_there_is_no_such_package() -> None:
    class NoRefresh(RealRunner):
        def run(self, argv, **kwargs):  # type: ignore[no-untyped-def]
            return done(0) if "update" in argv else super().run(argv, **kwargs)

    packages = NodePackages(NoRefresh(), RealClock(), is_root=True)
    with pytest.raises(PackagesFailed, match=r"no package source of this node has libz9-nonesuch"):
        packages.provide(("libz.so.9",), ALLOWED, DEBIAN, print, threading.Event())


@pytest.mark.skipif(shutil.which("dpkg-query") is None or os.geteuid() != 0, reason="needs apt and root")
def test_the_real_apt_leaves_an_installed_package_as_it_is() -> None:
    query = ("dpkg-query", "-W", "-f", "${Version} ${Status}", "libgomp1")
    before = RealRunner().run(query, timeout_s=20)
    if "install ok installed" not in before.stdout:
        pytest.skip("libgomp1 is not installed here")
    simulate = RealRunner().run((*MANAGERS["debian"].simulate, "libgomp1"), timeout_s=60)
    assert simulate.code == 0
    assert "Inst " not in simulate.stdout
    assert RealRunner().run(query, timeout_s=20).stdout == before.stdout
