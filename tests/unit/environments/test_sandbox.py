"""Hostile programs in the real sandbox."""

import os
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from nemo_rl_core.environments.sandbox import Finished, Limits, Sandbox
from nemo_rl_core.environments.sandbox.seccomp import filter_program
from nemo_rl_core.environments.sandbox.slots import Slots
from nemo_rl_core.errors import ResourceError

Run = Callable[..., Finished]


@pytest.fixture(scope="module")
def sandbox(namespaces: None) -> Sandbox:
    return Sandbox(Limits(cpu_seconds=1, wall_seconds=10, memory_mib=128, disk_mib=4))


@pytest.fixture
def run(sandbox: Sandbox) -> Iterator[Run]:
    """Runs a program, and checks that none of its processes is left."""
    before = set(psutil.pids())

    def go(program: str, *, stdin: str = "", limits: Limits | None = None) -> Finished:
        files = {"main.py": textwrap.dedent(program)}
        return sandbox.run(files, stdin=stdin, limits=limits)

    yield go
    # On a busy machine the kernel ends a killed process only after a while.
    deadline = time.monotonic() + 30
    while left := [each for each in set(psutil.pids()) - before if _is_left_over(each)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


def _is_left_over(pid: int) -> bool:
    """Whether a process is of a sandbox of this pytest worker, and not of a parallel one."""
    mine = psutil.Process()
    others = [each for each in mine.parents()[0].children() if each != mine]
    try:
        of_others = set(others) & set(psutil.Process(pid).parents())
    except psutil.NoSuchProcess:
        return False
    return not of_others and _of_a_sandbox(pid)


def _of_a_sandbox(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        zombie = process.status() == psutil.STATUS_ZOMBIE and process.ppid() == os.getpid()
        return zombie or "/program/main.py" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


def test_a_program_reads_stdin_and_writes_stdout(run: Run) -> None:
    ended = run("print(input()[::-1], end='')", stdin="abc\n")
    assert ended == Finished("cba", "", 0, timed_out=False, output_cut=False)
    assert ended.succeeded


def test_the_exit_code_and_the_traceback_are_returned(run: Run) -> None:
    ended = run("import sys; sys.exit(3)")
    assert (ended.exit_code, ended.succeeded) == (3, False)
    ended = run("1 / 0")
    assert ended.exit_code == 1
    assert "ZeroDivisionError" in ended.stderr


def test_a_program_sees_no_environment_variables_and_no_descriptors(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    descriptor = os.open("/etc/hostname", os.O_RDONLY)
    os.set_inheritable(descriptor, True)
    try:
        ended = run(
            """
            import os
            def is_open(number):
                try:
                    os.fstat(number)
                except OSError:
                    return False
                return True
            print(sorted(os.environ), [n for n in range(3, 64) if is_open(n)])
            """
        )
    finally:
        os.close(descriptor)
    assert ended.stdout == "['LC_CTYPE', 'PYTHONHASHSEED'] []\n"


def test_sets_of_text_have_the_same_order_in_every_run(run: Run) -> None:
    program = "print(list({'one', 'two', 'three', 'four', 'five', 'six'}))"
    assert run(program).stdout == run(program).stdout


def test_outside_files_do_not_exist(run: Run, tmp_path: Path) -> None:
    secret = tmp_path / "store" / "secret"
    secret.parent.mkdir()
    secret.write_text("hunter2")
    secret.chmod(0o666)
    program = f"""
        import os
        for path in ("/etc/shadow", "/etc/passwd", "/proc/1/environ", {str(secret)!r},
                     "../../../../etc/shadow", {str(Path(__file__))!r}):
            print(os.path.exists(path), end=" ")
        print(sorted(os.listdir("/dev")), os.listdir("/program"))
        """
    ended = run(program)
    assert ended.stdout == "False " * 6 + "['null'] ['main.py']\n"


def test_the_interpreter_cannot_be_changed(run: Run) -> None:
    ended = run(
        """
        import os
        for path in (os.__file__, "/usr/planted", "/lib/planted"):
            try:
                open(path, "w")
            except OSError as error:
                print(error.errno in (1, 13, 30))
        """
    )
    assert ended.stdout == "True\nTrue\nTrue\n"


def test_written_files_disappear_with_the_program(run: Run) -> None:
    assert run("open('left', 'w').write('here')").succeeded
    assert run("import os; print(os.listdir('.'))").stdout == "['main.py']\n"
    assert not Path("/program/left").exists()


def test_there_is_no_network(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        ended = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 2)")
        server.settimeout(0.1)
        with pytest.raises(TimeoutError):
            server.accept()
    assert "Operation not permitted" in ended.stderr


@pytest.mark.parametrize(
    "family", ["AF_UNIX", "AF_INET", "AF_INET6", "AF_NETLINK", "AF_VSOCK", "AF_ALG"]
)
def test_no_kind_of_socket_can_be_opened(run: Run, family: str) -> None:
    ended = run(f"import socket; socket.socket(socket.{family}, socket.SOCK_STREAM)")
    assert "Operation not permitted" in ended.stderr


def test_an_endless_loop_ends_at_its_cpu_time(run: Run) -> None:
    ended = run("while True: pass", limits=Limits(cpu_seconds=1, wall_seconds=120))
    assert ended.exit_code == -9
    assert not ended.succeeded


def test_a_program_that_waits_ends_at_the_deadline(run: Run) -> None:
    ended = run("import time; time.sleep(60)", limits=Limits(wall_seconds=0.5))
    assert ended == Finished("", "", None, timed_out=True, output_cut=False)


def test_ignoring_signals_does_not_prevent_the_end(run: Run) -> None:
    ended = run(
        """
        import signal, time
        for number in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        print("deaf", flush=True)
        time.sleep(60)
        """,
        limits=Limits(wall_seconds=1),
    )
    assert (ended.stdout, ended.exit_code, ended.timed_out) == ("deaf\n", None, True)


@pytest.mark.slow
def test_a_fork_bomb_stays_within_its_number_of_processes(run: Run) -> None:
    ended = run(
        """
        import os, time
        made = 0
        for _ in range(100):
            try:
                if os.fork() == 0:
                    time.sleep(60)
            except BlockingIOError:
                break
            made += 1
        print(made)
        """
    )
    # Four processes, including the program itself.
    assert ended.stdout == "3\n"
    bomb = run("import os\nwhile True:\n    try: os.fork()\n    except OSError: pass")
    assert not bomb.succeeded


def test_threads_count_as_processes(run: Run) -> None:
    ended = run(
        """
        import threading, time
        try:
            for made in range(100):
                threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
        except RuntimeError:
            print(made)
        """
    )
    assert ended.stdout == "3\n"


def test_a_memory_bomb_is_an_error_inside(run: Run) -> None:
    assert "MemoryError" in run("x = bytearray(1 << 30)").stderr
    grows = run("x = []\nwhile True: x.append(bytearray(1 << 20))")
    assert not grows.succeeded


@pytest.mark.parametrize(
    "call",
    [
        "os.memfd_create('x')",
        "libc_call('shmget', 0, 1 << 30, 0o1600)",
        "libc_call('unshare', 0x10000000)",
        "libc_call('mount', b'tmpfs', b'/program', b'tmpfs', 0, None)",
        "libc_call('ptrace', 16, 1, 0, 0)",
        "libc_call('syscall', 56, 0x10000011, 0, 0, 0, 0)",
        "resource.prlimit(1, resource.RLIMIT_CPU, (0, 0))",
    ],
)
def test_system_calls_that_evade_the_limits_are_refused(run: Run, call: str) -> None:
    ended = run(
        f"""
        import ctypes, errno, os, resource
        libc = ctypes.CDLL(None, use_errno=True)
        def libc_call(name, *arguments):
            if getattr(libc, name)(*arguments) == -1:
                raise OSError(ctypes.get_errno(), name)
        try:
            {call}
        except OSError as error:
            print(errno.errorcode[error.errno])
        """
    )
    assert ended.stdout == "EPERM\n"


def test_limits_cannot_be_raised(run: Run) -> None:
    ended = run(
        "import resource; resource.setrlimit(resource.RLIMIT_CPU, (100, 100))",
    )
    assert "not allowed to raise maximum limit" in ended.stderr


def test_single_files_and_their_total_are_limited(run: Run) -> None:
    single = run("open('big', 'wb').write(b'x' * (5 << 20))")
    assert not single.succeeded
    together = run("for i in range(9): open(str(i), 'wb').write(b'x' * (1 << 20))")
    assert "No space left" in together.stderr


@pytest.mark.slow
def test_endless_output_is_truncated(run: Run) -> None:
    ended = run("while True: print('y' * 1000)", limits=Limits(output_bytes=5000))
    assert len(ended.stdout) == 5000
    assert (ended.output_cut, ended.succeeded) == (True, False)
    ended = run("import os\nwhile True: os.write(2, b'y' * 1000)")
    assert len(ended.stderr) == 65536


def test_binary_output_is_decoded_with_replacement(run: Run) -> None:
    ended = run(r"import os; os.write(1, b'\xff\x00a')")
    assert ended.stdout == "\ufffd\x00a"


def test_a_program_cannot_kill_its_parent_or_the_group(run: Run) -> None:
    survived = run(
        """
        import os, signal
        for target in (os.getppid(), 1, -1):
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
                try:
                    os.kill(target, number)
                except OSError:
                    pass
        print("alive", flush=True)
        os.killpg(0, signal.SIGKILL)
        """
    )
    assert survived == Finished("alive\n", "", -9, timed_out=False, output_cut=False)


def test_daemons_end_with_the_program(run: Run) -> None:
    ended = run(
        """
        import os, time
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                time.sleep(60)
            os._exit(0)
        os.wait()
        print("done")
        """
    )
    # The daemon keeps stdout open; the fixture checks that it has ended.
    assert ended == Finished("done\n", "", 0, timed_out=False, output_cut=False)


def test_a_program_can_be_ended_before_it_starts(sandbox: Sandbox, run: Run) -> None:
    for _ in range(3):
        with sandbox.start({"main.py": "import time; time.sleep(60)"}) as running:
            running.terminate()
            assert running.wait().exit_code is None


def test_a_closed_output_does_not_end_the_program(run: Run) -> None:
    ended = run("import os, time; os.close(1); os.close(2); time.sleep(0.3); os._exit(7)")
    assert ended.exit_code == 7


@pytest.mark.slow
def test_deep_recursion_ends_in_the_program(run: Run) -> None:
    program = "import sys; sys.setrecursionlimit(10**9)\ndef f(): f()\nf()"
    ended = run(program, limits=Limits(cpu_seconds=1, wall_seconds=120, memory_mib=128))
    assert ended.exit_code in (1, -9, -11)


def _most_at_once(sandbox: Sandbox, program: str, num_programs: int) -> int:
    """Runs a program several times, and returns the maximum number at once."""
    most = 0
    done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.is_set():
            running = psutil.Process().children(recursive=True)
            most = max(most, sum(_of_a_sandbox(each.pid) for each in running))
            time.sleep(0.01)

    watcher = threading.Thread(target=watch)
    watcher.start()
    with ThreadPoolExecutor(num_programs) as pool:
        ended = list(pool.map(lambda _: sandbox.run({"main.py": program}), range(num_programs)))
    done.set()
    watcher.join()
    assert all(each.succeeded for each in ended)
    return most


@pytest.mark.thorough
def test_at_most_num_parallel_programs_compute_at_once(namespaces: None) -> None:
    busy = "import time\nwhile time.process_time() < 0.3: pass"
    assert _most_at_once(Sandbox(num_parallel=2), busy, 6) == 2


@pytest.mark.slow
def test_sleeping_programs_do_not_block_others(namespaces: None) -> None:
    sandbox = Sandbox(Limits(wall_seconds=60), num_parallel=1)
    sandbox.slots.most = 5  # independent of this machine's memory
    asleep = "import time; time.sleep(4)"
    assert _most_at_once(sandbox, asleep, 8) in (4, 5)


def test_the_number_of_programs_is_limited_by_memory() -> None:
    free_mib = psutil.virtual_memory().available / 2**20
    assert Slots(2, int(free_mib)).most == 2
    assert 3 <= Slots(2, int(free_mib / 8)).most <= 5


def test_a_program_ends_with_the_process_that_started_it(namespaces: None) -> None:
    code = """
        from nemo_rl_core.environments.sandbox import Sandbox
        print("up", flush=True)
        Sandbox().run({"main.py": "import time; time.sleep(11.25)"})
        """
    owner = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)], stdout=subprocess.PIPE, text=True
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == "up\n"
    program = _until(lambda: [each for each in _descendants(owner.pid) if _of_a_sandbox(each)])
    owner.kill()
    owner.wait()
    owner.stdout.close()
    _until(lambda: not any(psutil.pid_exists(each) for each in program))


def _descendants(pid: int) -> list[int]:
    return [each.pid for each in psutil.Process(pid).children(recursive=True)]


def _until(condition: Callable[[], object]) -> list[int]:
    deadline = time.monotonic() + 500
    while time.monotonic() < deadline:
        if result := condition():
            return result if isinstance(result, list) else []
        time.sleep(0.02)
    raise AssertionError("the condition did not become true")


FORKS = """
import os, socket, time
made = 0
try:
    while made < 100:
        if os.fork() == 0:
            time.sleep(60)
        made += 1
except BlockingIOError:
    pass
print(os.getuid(), made, os.path.exists("/etc"), sorted(os.listdir("/dev")))
socket.socket()
"""


@pytest.mark.thorough
@pytest.mark.skipif(
    os.geteuid() != 0 or not Path("/usr/bin/python3").exists(),
    reason="the tests already run without root, or other users cannot read the interpreter",
)
def test_a_user_namespace_without_root_gives_the_same_isolation(namespaces: None) -> None:
    code = f"""
import os, sys
from nemo_rl_core.environments.sandbox import Sandbox
assert os.geteuid() == 65534
sys.executable, sys.base_prefix = "/usr/bin/python3", "/usr"
print(Sandbox().run({{"main.py": {FORKS!r}}}))
"""
    # The only capability: reading root's files, since the tests' interpreter may be among them.
    kept = "+dac_read_search"
    as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
    as_nobody += [f"--inh-caps={kept}", f"--ambient-caps={kept}", "--"]
    ended = subprocess.run(
        [*as_nobody, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "65534 3 False ['null']" in ended.stdout, ended.stderr
    assert "Operation not permitted" in ended.stdout


@pytest.mark.thorough
@pytest.mark.skipif(os.geteuid() != 0, reason="only root has a capability to lose")
def test_a_machine_without_namespaces_is_refused() -> None:
    code = "from nemo_rl_core.environments.sandbox import Sandbox; Sandbox()"
    # Root in an ordinary container.
    as_root = ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", "--"]
    ended = subprocess.run(
        [*as_root, sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1
    assert "no sandbox can be built" in ended.stderr
    assert "unshare: Operation not permitted" in ended.stderr
    assert "CAP_SYS_ADMIN" in ended.stderr


def test_an_unknown_machine_is_refused() -> None:
    assert len(filter_program("x86_64")) == len(filter_program("aarch64"))
    with pytest.raises(ResourceError, match="system calls"):
        filter_program("riscv64")
