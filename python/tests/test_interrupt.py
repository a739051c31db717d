"""Ctrl-C ends every call that waits. All deadlines are ten minutes: nothing else could end them."""

import signal
import subprocess
import sys

import pytest

START = """
import fedlane, socket, threading
LONG = 600_000
# The others fail when the session ends; only the main thread's error is looked at.
threading.excepthook = lambda *_: None
region = fedlane.Region({"w": ("float32", (1 << 24,))})
def listen(clients=1, **more):
    return fedlane.Aggregator("127.0.0.1:0", clients=clients, deadline_ms=LONG, **more)
def join(aggregator, name="a", progress=None):
    model = fedlane.Region({"w": ("float32", (1 << 24,))})
    return fedlane.Client(aggregator.address, name=name, examples=1, model=model,
                          deadline_ms=LONG, progress=progress)
def beside(work):
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
def hold(client):
    with client:
        next(client)
        threading.Event().wait()
def ready(*_):
    print("ready", flush=True)
"""

CALLS = {
    "gather": "a = listen(); ready(); a.gather()",
    "gather, one of two": """
a = listen(2)
beside(lambda: join(a))
ready(); a.gather()
""",
    "join, others are missing": """
a = listen(2)
beside(a.gather)
ready(); join(a)
""",
    "join, nobody answers": """
silent = socket.create_server(("127.0.0.1", 0))
address = "127.0.0.1:%d" % silent.getsockname()[1]
ready(); fedlane.Client(address, name="a", examples=1, model=region, deadline_ms=LONG)
""",
    "round": """
a = listen()
beside(lambda: hold(join(a)))
with a:
    a.gather()
    ready(); a.round()
""",
    "next": """
a = listen()
beside(a.gather)
with join(a) as client:
    ready(); next(client)
""",
    # In the order of names "b" is not read before "a" has begun, which it never does.
    "send": """
a = listen(2, order="client")
beside(lambda: (a.gather(), a.round()))
beside(lambda: hold(join(a, "a")))
with join(a, "b", progress=ready) as client:
    next(client)
    client.send()
""",
}


@pytest.mark.parametrize("call", CALLS)
def test_ctrl_c(call):
    command = [sys.executable, "-c", START + CALLS[call]]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # Whoever runs the tests in the background may have it ignored.
    heed = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # noqa: E731
    with subprocess.Popen(command, preexec_fn=heed, **pipes) as process:
        try:
            assert process.stdout.readline() == "ready\n", process.communicate()[1]
            process.send_signal(signal.SIGINT)
            errors = process.communicate(timeout=60)[1]
        finally:
            process.kill()
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert process.returncode == -signal.SIGINT


def test_other_threads_run_while_a_call_waits():
    # With the GIL held by gather(), the main thread could neither count nor join.
    script = """
a = listen()
waiting = threading.Thread(target=a.gather)
waiting.start()
count = sum(range(1000))
with join(a):
    waiting.join()
a.close()
print(count)
"""
    command = [sys.executable, "-c", START + script]
    assert subprocess.check_output(command, text=True, timeout=60) == "499500\n"
