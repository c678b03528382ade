"""HTTP servers on this machine, for tests of what fetches and uploads."""

import contextlib
import threading


@contextlib.contextmanager
def serving(server):
    """Serve in a thread until the end of the block; yields the address."""
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
