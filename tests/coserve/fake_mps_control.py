"""Stands in for nvidia-cuda-mps-control: the control daemon, its servers, its command line, and CUDA processes as its clients.

mps_harness.py makes an executable of that name of it, and one of the server's name beside it, which only sleeps.

    nvidia-cuda-mps-control -d         the daemon, in the background: CUDA_MPS_PIPE_DIRECTORY, CUDA_MPS_LOG_DIRECTORY, CUDA_VISIBLE_DEVICES
    echo COMMAND | nvidia-cuda-mps-control
    nvidia-cuda-mps-control client     a process that initialises CUDA: joins the daemon or, as CUDA does, goes on without one

Replies that NVIDIA documents: `ps` (title and columns), terminate_client (0). Replies that users of drivers 550 to 580 report: NO_DAEMON,
BUSY, ALREADY, "Invalid process PID!", "Server PID not found", "Server not found", percentages as 25.0. Unknown commands, and the state of
a server as a bare word, are guesses.

What happened is in CUDA_MPS_LOG_DIRECTORY/events.log, a line each: commands, "joined PID", "left PID".

Injected faults: the words in CUDA_MPS_LOG_DIRECTORY/fault, read at each command.
    start_fails  start_hangs  start_silent     `-d` ends with status 1 | never returns | starts nothing and says so to nobody
    hangs                                      the daemon takes a command and never answers
    terminate_hangs  terminate_fails           only terminate_client: no answer | 201
    deaf                                       SIGTERM and quit are ignored
    crashes                                    the daemon dies on the next command
    faulted                                    servers are in state FAULT
    slow                                       clients that ended are listed on
    garbage                                    replies are unlike any known
"""

import os
import selectors
import signal
import socket
import sys
import time
from fcntl import LOCK_EX, LOCK_NB, flock

NO_DAEMON = "Cannot find MPS control daemon process"
BUSY = "Cannot send command to MPS control daemon process"
ALREADY = "An instance of this daemon is already running"
PIPES = os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps")
LOGS = os.environ.get("CUDA_MPS_LOG_DIRECTORY", "/var/log/nvidia-mps")
SOCKET, PID_FILE = f"{PIPES}/control", f"{PIPES}/nvidia-cuda-mps-control.pid"
PACKET = 4096


def faults() -> set[str]:
    try:
        with open(f"{LOGS}/fault") as f:
            return set(f.read().split())
    except OSError:
        return set()


def note(event: str) -> None:
    with open(f"{LOGS}/events.log", "a") as log:
        log.write(f"{event}\n")


class Daemon:
    """One server at most: of the only user there is. server: its pid, or 0; clients: connection → pid, devices, command."""

    def __init__(self) -> None:
        self.server = 0
        self.clients: dict[socket.socket, tuple[int, list[str], str]] = {}
        self.pids: dict[socket.socket, int] = {}  # also of those whose contexts were ended
        self.ui: socket.socket | None = None
        self.devices = [d for d in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if d]
        self.ended = False
        self.selector = selectors.DefaultSelector()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)

    def run(self) -> None:
        if os.path.exists(SOCKET):
            os.unlink(SOCKET)
        self.listener.bind(SOCKET)
        self.listener.listen(16)
        with open(PID_FILE, "w") as f:
            f.write(f"{os.getpid()}\n")
        signal.signal(signal.SIGTERM, lambda *_: None if "deaf" in faults() else os._exit(0))
        self.selector.register(self.listener, selectors.EVENT_READ)
        while not self.ended:
            for key, _ in self.selector.select(1.0):
                self.serve(key.fileobj)
        os.unlink(PID_FILE)
        if self.server:
            os.kill(self.server, signal.SIGKILL)

    def serve(self, ready) -> None:
        if ready is self.listener:
            connection, _ = self.listener.accept()
            self.selector.register(connection, selectors.EVENT_READ)
            return
        packet = ready.recv(PACKET).decode()
        if not packet:
            self.forget(ready)
        elif packet.startswith("client "):
            _, pid, devices, command = packet.split(" ", 3)
            self.join(ready, int(pid), devices.split(","), command)
        elif packet == "ui":
            ready.send((BUSY if self.ui else "ok").encode())
            self.ui = self.ui or ready
        else:
            self.obey(ready, packet)

    def forget(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        connection.close()
        if connection in self.pids:
            note(f"left {self.pids.pop(connection)}")
        if "slow" not in faults():
            self.clients.pop(connection, None)
        self.ui = None if connection is self.ui else self.ui

    def join(self, connection, pid: int, devices: list[str], command: str) -> None:
        if not set(devices) <= set(self.devices):
            connection.send(b"no such device")
            return
        if not self.server:
            self.server = self.start_server()
        self.clients[connection] = (pid, devices, command)
        self.pids[connection] = pid
        note(f"joined {pid}")
        connection.send(b"joined")

    def start_server(self) -> int:
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            server = os.path.join(os.path.dirname(sys.argv[0]), "nvidia-cuda-mps-server")
            os.execv(server, [server])
        return pid

    def obey(self, ui: socket.socket, command: str) -> None:
        active = faults()
        note(command)
        if "crashes" in active:
            os._exit(1)
        if "hangs" in active or ("terminate_hangs" in active and command.startswith("terminate_client")):
            return
        reply = "!? 0x7f" if "garbage" in active else self.reply(command.split(), active)
        ui.send((reply or " ").encode())

    def reply(self, words: list[str], active: set[str]) -> str:
        name, arguments = words[0], words[1:]
        if name == "quit":
            self.ended = "deaf" not in active
            return ""
        if name == "ps":
            return self.ps()
        if name == "get_server_list":
            return str(self.server) if self.server else ""
        if name == "get_default_active_thread_percentage":
            return "100.0"
        if name in ("get_server_status", "get_client_list", "terminate_client"):
            return self.of_server(name, arguments, active)
        return f"Unrecognized command: {name}"

    def of_server(self, name: str, arguments: list[str], active: set[str]) -> str:
        if int(arguments[0]) != self.server:
            return f"Server {arguments[0]} not found"
        if name == "get_server_status":
            return "FAULT" if "faulted" in active else "ACTIVE"
        if name == "get_client_list":
            return "\n".join(str(pid) for pid, _, _ in self.clients.values())
        return "201" if "terminate_fails" in active else self.terminate(int(arguments[1]))

    def terminate(self, pid: int) -> str:
        for connection, client in self.clients.items():
            if client[0] == pid:
                connection.send(b"CUDA_ERROR_MPS_CLIENT_TERMINATED")
                del self.clients[connection]
                return "0"
        return f"Invalid process {pid}!"

    def ps(self) -> str:
        if not self.server:
            return "Server not found"
        rows = [
            f"{pid} {number} {self.server} {device[:22]} 4026531836 {command}"
            for number, (pid, devices, command) in enumerate(self.clients.values())
            for device in devices
        ]
        return "\n".join(["PID ID SERVER DEVICE NAMESPACE COMMAND", *rows]) if rows else ""


def start_daemon() -> int:
    active = faults()
    if "start_hangs" in active:
        time.sleep(600)
    if "start_fails" in active:
        print("MPS is not supported on this system")
        return 1
    lock = os.open(f"{PIPES}/control_lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        flock(lock, LOCK_EX | LOCK_NB)
    except BlockingIOError:
        print(ALREADY)
        return 1
    if "start_silent" in active or os.fork():
        return 0
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for standard in range(3):
        os.dup2(null, standard)
    Daemon().run()
    return 0


def connected(greeting: str) -> tuple[socket.socket | None, str]:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.connect(SOCKET)
        connection.send(greeting.encode())
        return connection, connection.recv(PACKET).decode()
    except OSError:
        return None, ""


def command_line() -> int:
    for line in sys.stdin:
        connection, greeted = connected("ui")
        if connection is None or not greeted:
            print(NO_DAEMON, file=sys.stderr)
            return 1
        if greeted == BUSY:
            print(BUSY, file=sys.stderr)
            return 1
        connection.send(line.strip().encode())
        reply = connection.recv(PACKET).decode()
        if not reply:
            print(NO_DAEMON, file=sys.stderr)
            return 1
        print(reply.strip())
        connection.close()
    return 0


def client() -> int:
    """Says how it fares, one line each: joined | alone | no such device; then each message of the server. Lives until it is killed."""
    connection, reply = connected(f"client {os.getpid()} {os.environ.get('CUDA_VISIBLE_DEVICES', '')} fake client")
    print(reply or "alone", flush=True)
    while connection is not None and (message := connection.recv(PACKET).decode()):
        print(message, flush=True)
    time.sleep(600)
    return 0


if __name__ == "__main__":
    sys.exit(start_daemon() if "-d" in sys.argv[1:] else client() if "client" in sys.argv[1:] else command_line())
