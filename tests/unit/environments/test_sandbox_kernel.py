"""System calls and buffers of programs in the sandbox."""

import textwrap

from nemo_rl_core.environments.sandbox import Finished, Sandbox


def _run(program: str) -> Finished:
    return Sandbox().run({"main.py": textwrap.dedent(program)})


def test_buffers_of_sockets_and_pipes_are_bounded(namespaces: None) -> None:
    ended = _run(
        """
        import fcntl, os, socket
        kept, filled = [], 0
        def fill(write):
            global filled
            try:
                while True: filled += write(b"x" * 32768)
            except BlockingIOError: pass
        def tried(grow):
            try: grow()
            except PermissionError: pass
        try:
            while True:
                for end in (pair := socket.socketpair()):
                    end.setblocking(False)
                    tried(lambda: end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 24))
                    fill(end.send)
                    # Descriptors in flight would not count towards the limit.
                    tried(lambda: socket.send_fds(end, [b"x"], [0]))
                kept.append(pair)
                reading, writing = os.pipe2(os.O_NONBLOCK)
                tried(lambda: fcntl.fcntl(writing, 1031, 1 << 20))
                fill(lambda text: os.write(writing, text))
        except OSError:
            print(len(kept), filled >> 20)
        """
    )
    pairs, mebibytes = map(int, ended.stdout.split())
    assert pairs >= 14
    assert mebibytes < 15


def test_common_libraries_work_in_the_sandbox(namespaces: None) -> None:
    ended = _run(
        """
        import asyncio, concurrent.futures, multiprocessing, sqlite3, subprocess, sys
        async def add(a, b):
            return await asyncio.to_thread(lambda: a + b)
        print(asyncio.run(add(1, 2)))
        with sqlite3.connect("file") as connection:
            print(connection.execute("select 3").fetchall())
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            print(list(pool.map(abs, [-1])))
        one, other = multiprocessing.Pipe()
        one.send({1: 2})
        print(other.recv())
        run = subprocess.run([sys.executable, "-c", "print(5)"], capture_output=True, text=True)
        print(run.stdout)
        """
    )
    assert ended.stdout == "3\n[(3,)]\n[1]\n{1: 2}\n5\n\n", ended.stderr
