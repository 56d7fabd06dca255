"""Failing saves, snapshots and recordings: one line, the old data, and no leftovers.

    save_faults.py DMAFILE HELPERS short              missing permissions, quotas and limits
    save_faults.py DMAFILE HELPERS full FS...         disks that are full
    save_faults.py DMAFILE HELPERS broken FS...       disks that fail to write
    save_faults.py DMAFILE HELPERS meanwhile FOLDER   signals, files that change, disks that vanish

As root, with loop and the device mapper. HELPERS include those of the C library.
"""

import contextlib
import fcntl
import hashlib
import itertools
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from tests.vm.inside.camera import reader
from tests.vm.inside.crash_recordings import Recording, Way
from tests.vm.inside.crashes import MAKE, SECTOR
from tests.vm.inside.faults import device_of, listens
from tests.vm.inside.loads import BLOB, MIB, PATIENCE, USER, as_user, settles

RUN = Path("/run/saves")
MOUNT = RUN / "mount"
SIZE = 6 * MIB + 777
OLD = b"old" * 5000
NAME = "failing"
SOURCE = RUN / "source"
"""A file on tmpfs, which is memory."""
MANIFEST = "dmafile-snapshot.json"
LEFT = 3 * MIB
"""The free space of a full disk: less than a save needs."""

Seen = dict[str, tuple[int, str]]
Process = subprocess.Popen[str]


def call(*words: str, text: str = "") -> str:
    done = subprocess.run(words, input=text, capture_output=True, text=True)
    assert done.returncode == 0, f"{words}: {done.returncode}, {done.stderr}"
    return done.stdout


def seen(folder: Path) -> Seen:
    """The size and digest of every file in a folder; a broken disk may keep the lock."""
    other = {"filler", ".dmafile-snapshot.lock"}
    files = (path for path in folder.rglob("*") if path.is_file() and path.name not in other)
    return {
        str(path.relative_to(folder)): (path.stat().st_size, sha256(path)) for path in sorted(files)
    }


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class Saves:
    """Commands in a folder that must fail."""

    def __init__(self, dmafile: str, helpers: str) -> None:
        RUN.mkdir()
        MOUNT.mkdir()
        self.dmafile = str(shutil.copy(dmafile, RUN / "dmafile"))
        for helper in ("parts", "recorder"):
            shutil.copy(Path(helpers) / helper, RUN / helper)
        SOURCE.write_bytes(BLOB[:SIZE])
        SOURCE.chmod(0o666)
        self.count = 0
        self.records = reader()

    def commands(self, folder: Path, *words: str) -> dict[str, list[str]]:
        """Saves of a file, of several parts and of several sources."""
        save = [self.dmafile, "save", "--quiet", *words]
        two = [f"{SOURCE}={name}" for name in ("a", "b")]
        return {
            "save": [*save, str(SOURCE), str(folder / "to")],
            "new": [*save, str(SOURCE), str(folder / "new")],
            "parts": [str(RUN / "parts"), str(folder / "to"), str(SOURCE)],
            "snapshot": [*save, *two, str(folder / "task")],
        }

    def prepare(self, folder: Path, user: bool = False) -> None:
        (folder / "to").write_bytes(OLD)
        (folder / "task").mkdir()
        small = RUN / "small"
        small.write_bytes(OLD)
        two = [f"{small}={name}" for name in ("a", "b")]
        if user:
            for path in (folder, folder / "to", folder / "task"):
                os.chown(path, USER, USER)
        words = [self.dmafile, "save", "--quiet", *two, str(folder / "task")]
        call(*(as_user(words) if user else words))

    def fails(
        self, folder: Path, command: Sequence[str], *says: str, stdin: bytes = b"", at: str = ""
    ) -> str:
        """Asserts that a command fails with one line and changes nothing; returns the line."""
        self.count += 1
        before = seen(folder)
        done = subprocess.run(command, input=stdin, capture_output=True)
        line, case = done.stderr.decode(), f"{at} {command}: {done}"
        assert (done.returncode, done.stdout) == (1, b""), case
        self.is_one_line(line, case, *says)
        assert seen(folder) == before, f"{case}: {seen(folder)}, not {before}"
        return line

    def under_way(
        self,
        folder: Path,
        command: Sequence[str],
        act: Callable[[Process], object],
        status: int,
        *fds: int,
        repair: Callable[[], object] = lambda: None,
    ) -> str:
        """Runs a command with `act` during its writes and `repair` afterwards; returns its line."""
        self.count += 1
        before = seen(folder)
        process = Process(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, pass_fds=fds
        )
        listens(process)
        writes(process)
        act(process)
        out, line = process.communicate(timeout=PATIENCE)
        case = f"{command}: {process.returncode}, {out}, {line}"
        assert (process.returncode, out) == (status, ""), case
        if status > 0:
            self.is_one_line(line, case)
            repair()
            assert seen(folder) == before, f"{case}: {seen(folder)}"
        return line

    def is_one_line(self, line: str, case: str, *says: str) -> None:
        assert line.startswith("dmafile: ") and line.count("\n") == 1, case
        for text in says:
            assert text in line, f"{case}: no {text!r}"

    def record(self, folder: Path, *says: str, user: bool = False) -> None:
        """Records until an append fails; acknowledged records are kept and recording can go on."""
        self.count += 1
        path, filler = folder / "a.rec", folder / "filler"
        recording = self.recording(path, user)
        number, said = 0, recording.began
        while not said.startswith("failed: "):
            assert number < 200 and said == ("started" if number == 0 else f"{number}"), said
            said = recording.ask(f"append 4096 {MIB + number}")
            if said == f"{number}":
                number += 1
                said = recording.ask("sync")
        for text in says:
            assert text in said, said
        filler.unlink(missing_ok=True)
        if not user:
            # There is room again.
            assert recording.ask(f"append 4096 {MIB + number}") == f"{number}"
            number += 1
        said = recording.ask("finish")
        assert said == f"{number}", said
        recording.ends()
        self.recorded(path, number)

    def recording(self, path: Path, user: bool = False, io: str = "auto") -> Recording:
        command = [str(RUN / "recorder"), *Way("auto", io).words(path, SOURCE)]
        return Recording(as_user(command) if user else command)

    def recorded(self, path: Path, durable: int) -> None:
        records = list(self.records(str(path)))
        assert len(records) >= durable, (len(records), durable)
        for number, record in enumerate(records):
            assert record[0] == number and record[8] == BLOB[4096 : 4096 + MIB + number], record[:8]


@contextlib.contextmanager
def disk(fs: str, *options: str) -> Iterator[tuple[Path, str]]:
    """A file system on a disk whose table can be changed, and the underlying disk."""
    image, (size, make) = RUN / "image", MAKE[fs]
    # No blocks are reserved for root.
    more = ("-m0",) if fs == "ext4" else ()
    with image.open("wb") as file:
        file.truncate(size)
    loop = call("losetup", "--find", "--show", str(image)).strip()
    call("dmsetup", "create", NAME, "--table", f"0 {size // SECTOR} linear {loop} 0")
    # There is no udev that would make the node.
    call("dmsetup", "mknodes")
    call(*make, *more, f"/dev/mapper/{NAME}")
    call("mount", "-t", fs, *options, f"/dev/mapper/{NAME}", str(MOUNT))
    try:
        yield MOUNT, loop
    finally:
        # After a failure, some of this may be gone already.
        for words in (("umount", str(MOUNT)), ("dmsetup", "remove", "--retry", NAME)):
            subprocess.run(words, capture_output=True)
        call("losetup", "--detach", loop)
        image.unlink()


def becomes(table: str) -> None:
    """Replaces the table of the disk; the bytes stay the same."""
    call("dmsetup", "suspend", "--nolockfs", NAME)
    call("dmsetup", "load", NAME, text=table)
    call("dmsetup", "resume", NAME)


def fill(folder: Path, left: int) -> None:
    """Fills a file system except for `left` bytes."""
    with (folder / "filler").open("wb") as filler:
        end = 0
        while (free := os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize - left) > 0:
            step = max(min(free, 64 * MIB) >> 1, 4096)
            try:
                os.posix_fallocate(filler.fileno(), end, step)
            except OSError:
                break
            end += step


def full(saves: Saves, *systems: str) -> None:
    for fs in systems:
        with disk(fs) as (folder, _):
            saves.prepare(folder)
            fill(folder, LEFT)
            for name, command in saves.commands(folder).items():
                saves.fails(folder, command, "(ENOSPC); free space", at=f"{fs} {name}")
            # With a stream, the error comes later.
            command = [saves.dmafile, "save", "--quiet", "-", str(folder / "to")]
            saves.fails(folder, command, "(ENOSPC)", stdin=BLOB[:SIZE], at=fs)
            # In place and past the end: there is room for the part inside the file.
            command = [saves.dmafile, "save", "--quiet", str(SOURCE), "--offset=0"]
            command.append(str(folder / "to"))
            size = (folder / "to").stat().st_size
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 1, done
            saves.is_one_line(done.stderr, f"{fs}: {done}", "(ENOSPC)")
            assert (folder / "to").read_bytes()[: len(OLD)] in (OLD, BLOB[: len(OLD)])
            saves.count += 1
            os.truncate(folder / "to", size)
            saves.record(folder, "(ENOSPC); free space")
        print(f"{fs}: {saves.count} so far", flush=True)


def limits(saves: Saves) -> None:
    """Quotas, inodes, and the limit on file size."""
    with disk("xfs", "-o", "uquota") as (folder, _):
        saves.prepare(folder, user=True)
        call("xfs_quota", "-x", "-c", f"limit bhard={LEFT} {USER}", str(folder))
        for name, command in saves.commands(folder).items():
            says = "(EDQUOT); free space, or ask for a larger quota"
            saves.fails(folder, as_user(command), says, at=f"quota {name}")
        command = as_user([saves.dmafile, "save", "--quiet", "-", str(folder / "to")])
        saves.fails(folder, command, "(EDQUOT)", stdin=BLOB[:SIZE], at="quota")
        saves.record(folder, "(EDQUOT)", user=True)
        # With a quota on inodes, no file can be created.
        call("xfs_quota", "-x", "-c", f"limit bhard=0 ihard=1 {USER}", str(folder))
        for name, command in saves.commands(folder).items():
            saves.fails(folder, as_user(command), "(EDQUOT)", at=f"inodes {name}")
    with disk("ext4") as (folder, _):
        saves.prepare(folder)
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (LEFT, before[1]))
        for name, command in saves.commands(folder).items():
            says = "(EFBIG); raise the limit on file size: ulimit -f"
            saves.fails(folder, command, says, at=f"limit {name}")
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def broken(saves: Saves, *systems: str) -> None:
    """Each write fails, either at once or at the sync."""
    call("modprobe", "-a", "dm-flakey")
    for fs, io in itertools.product(systems, ("direct", "buffered")):
        for name in saves.commands(RUN):
            with disk(fs) as (folder, loop):
                saves.prepare(folder)
                before = seen(folder)
                command = saves.commands(folder, f"--io={io}")[name]
                with failing(fs, loop):
                    done = subprocess.run(command, capture_output=True, text=True)
                case = f"{fs} {io} {name}: {done}"
                assert (done.returncode, done.stdout) == (1, ""), case
                saves.is_one_line(done.stderr, case, "cannot ")
                assert "(EIO)" in done.stderr or "(EROFS)" in done.stderr, case
                assert seen(folder) == before, f"{case}: {seen(folder)}"
                saves.count += 1
        with disk(fs) as (folder, loop):
            path = folder / "a.rec"
            recording = saves.recording(path, io=io)
            assert recording.ask(f"append 4096 {MIB}") == "0" and recording.ask("sync") == "1"
            with failing(fs, loop):
                said = [recording.ask(f"append 4096 {MIB + 1}"), recording.ask("sync")]
                said.append(recording.ask("finish"))
                recording.ends()
            assert said[1:] == [said[1]] * 2 and "(EIO)" in said[1], f"{fs} {io}: {said}"
            saves.recorded(path, 1)
            saves.count += 1
        print(f"{fs}, {io}: {saves.count} so far", flush=True)


@contextlib.contextmanager
def failing(fs: str, loop: str) -> Iterator[None]:
    """Makes writes to the disk fail; afterwards, mounts the disk as it is."""
    sectors = MAKE[fs][0] // SECTOR
    call("sync")
    becomes(f"0 {sectors} flakey {loop} 0 0 3600 1 error_writes")
    yield
    call("umount", str(MOUNT))
    becomes(f"0 {sectors} linear {loop} 0")
    call("mount", "-t", fs, f"/dev/mapper/{NAME}", str(MOUNT))


def meanwhile(saves: Saves, spare: str) -> None:
    """Events during a save, in which each write takes 100 ms."""
    call("modprobe", "-a", "dm-delay")
    with disk("ext4") as (folder, loop):
        saves.prepare(folder)
        sectors = MAKE["ext4"][0] // SECTOR
        becomes(f"0 {sectors} delay {loop} 0 0 {loop} 0 100")
        slow = ("--block=64K", "--queue-depth=1", "--io=direct")
        for name, command in saves.commands(folder, *slow).items():
            for number, status in (
                (signal.SIGINT, 130),
                (signal.SIGTERM, 130),
                (signal.SIGKILL, -signal.SIGKILL),
            ):
                if name == "parts":
                    # The library leaves signals to its caller.
                    continue

                def act(process: Process, number: int = number) -> None:
                    process.send_signal(number)

                line = saves.under_way(folder, command, act, status)
                assert status < 0 or "(ECANCELED)" in line, line
        # The source ends early.
        for make in (memory, file):
            fd, words = make()
            command = [saves.dmafile, "save", "--quiet", *slow, words, str(folder / "to")]
            line = saves.under_way(folder, command, cut(fd), 1, fd)
            assert "(ENODATA)" in line, line
            os.close(fd)
        # The source is sealed; sealing may fail with EBUSY during the save.
        fd, words = memory()
        command = [saves.dmafile, "save", "--quiet", *slow, words, str(folder / "new")]
        saves.under_way(folder, command, lambda _: seal(fd), 0, fd)
        assert sha256(folder / "new") == hashlib.sha256(BLOB[:SIZE]).hexdigest()
        os.close(fd)
        # A folder is created at the target.
        command = saves.commands(folder, *slow)["new"]
        (folder / "new").unlink()
        line = saves.under_way(folder, command, lambda _: (folder / "new").mkdir(), 1)
        assert "a folder has taken its place (EISDIR)" in line, line
        (folder / "new").rmdir()

        # The device disappears and comes back.
        def comes_back() -> None:
            call("umount", str(folder))
            becomes(f"0 {sectors} delay {loop} 0 0 {loop} 0 100")
            call("mount", f"/dev/mapper/{NAME}", str(folder))

        for name in ("save", "snapshot"):
            command = saves.commands(folder, *slow)[name]
            line = saves.under_way(
                folder, command, lambda _: becomes(f"0 {sectors} error"), 1, repair=comes_back
            )
            assert "(EIO)" in line or "(EROFS)" in line, line
    vanishes(saves, Path(spare))


def vanishes(saves: Saves, folder: Path) -> None:
    """Removes a disk."""
    save = [saves.dmafile, "save", "--quiet", "-", str(folder / "to")]
    pipe = subprocess.PIPE
    process = subprocess.Popen(save, stdin=pipe, stdout=pipe, stderr=pipe)
    recording = saves.recording(folder / "a.rec")
    assert recording.ask(f"append 0 {MIB}") == "0" and recording.ask("sync") == "1"
    assert process.stdin
    process.stdin.write(BLOB[: 4 * MIB])
    process.stdin.flush()
    writes(process)
    (device_of(folder) / "device/device/remove").write_text("1")
    # The save may fail before it reads this.
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(BLOB[: 4 * MIB])
    out, said = process.communicate(timeout=PATIENCE)
    assert (process.returncode, out) == (1, b""), f"{process}, {said!r}"
    saves.is_one_line(said.decode(), "pulled out", "(EIO)")
    answers = [recording.ask(f"append 0 {MIB}"), recording.ask("sync")]
    assert any("(EIO)" in one for one in answers), answers
    recording.ask("finish")
    recording.ends()
    saves.count += 2


def memory() -> tuple[int, str]:
    fd = os.memfd_create("source", os.MFD_ALLOW_SEALING)
    os.write(fd, BLOB[:SIZE])
    return fd, f"fd:{fd}"


def file() -> tuple[int, str]:
    path = RUN / "short"
    path.write_bytes(BLOB[:SIZE])
    return os.open(path, os.O_RDWR), str(path)


def cut(fd: int) -> Callable[[Process], None]:
    return lambda _: os.truncate(fd, MIB)


def seal(fd: int) -> None:
    with contextlib.suppress(BlockingIOError, OSError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def writes(process: "Process | subprocess.Popen[bytes]") -> None:
    """Waits until a save has written some of its file."""

    def wrote() -> int:
        assert process.poll() is None, f"over too early: {process.communicate()}"
        lines = Path(f"/proc/{process.pid}/io").read_text().splitlines()
        return int(dict(line.split(": ") for line in lines)["write_bytes"])

    settles(wrote, lambda count: count > MIB, "a save that never wrote")


def refused(saves: Saves) -> None:
    """Missing permissions, flags, and a read-only file system."""
    with disk("ext4") as (folder, _):
        saves.prepare(folder)
        commands = saves.commands(folder)
        task = [saves.dmafile, "save", "--quiet", str(SOURCE), str(folder / "task")]
        saves.fails(folder, task, "it is a folder (EISDIR)")
        for name in ("save", "parts"):
            for flag in ("a", "i"):
                call("chattr", f"+{flag}", str(folder / "to"))
                saves.fails(folder, commands[name], "(EPERM); remove its flag")
                call("chattr", f"-{flag}", str(folder / "to"))
        for place, name in (("", "new"), ("task", "snapshot"), ("", "save")):
            call("chattr", "+i", str(folder / place))
            saves.fails(folder, commands[name], "cannot ", "; ")
            call("chattr", "-i", str(folder / place))
        for name, command in commands.items():
            saves.fails(folder, as_user(command), "(EACCES)", at=name)
        began = saves.recording(folder / "a.rec", user=True).began
        assert "(EACCES)" in began, began
        call("mount", "-o", "remount,ro", str(folder))
        for name, command in commands.items():
            saves.fails(folder, command, "(EROFS)", at=name)
        began = saves.recording(folder / "a.rec").began
        assert "(EROFS)" in began, began
        saves.count += 2


def short(saves: Saves) -> None:
    refused(saves)
    limits(saves)


def main() -> None:
    dmafile, helpers, part, *words = sys.argv[1:]
    call("modprobe", "-a", "loop", "dm-mod", *(fs for fs in words if fs in MAKE))
    saves = Saves(dmafile, helpers)
    parts: Mapping[str, Callable[..., None]] = {
        "full": full,
        "broken": broken,
        "meanwhile": meanwhile,
        "short": short,
    }
    parts[part](saves, *words)
    print(f"{saves.count} faults checked")


if __name__ == "__main__":
    main()
