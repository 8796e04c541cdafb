"""Exit with 0 if the health name `liveness` at HOST PORT is SERVING: `health_check.py HOST PORT`.

Encodes one HTTP/2 call itself: the check runs every ten seconds, and importing grpcio takes 250 ms of CPU.
"""

import socket
import sys

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS = 0, 1, 4  # RFC 9113, section 6
_END_STREAM, _END_HEADERS = 1, 4
_SERVING = b"\x08\x01"  # HealthCheckResponse(status=SERVING)


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return len(payload).to_bytes(3, "big") + bytes((kind, flags)) + stream.to_bytes(4, "big") + payload


def _text(value: bytes) -> bytes:
    return bytes((len(value),)) + value


def _request(service: bytes) -> bytes:
    # RFC 7541: indexed fields (":method: POST", ":scheme: http"), then literals whose names are indexed or spelled out.
    headers = b"\x83\x86" + b"\x04" + _text(b"/grpc.health.v1.Health/Check") + b"\x01" + _text(b"localhost")
    headers += b"\x0f\x10" + _text(b"application/grpc") + b"\x00" + _text(b"te") + _text(b"trailers")
    message = b"\x0a" + _text(service)
    data = b"\x00" + len(message).to_bytes(4, "big") + message
    start = _PREFACE + _frame(_SETTINGS, 0, 0, b"")
    return start + _frame(_HEADERS, _END_HEADERS, 1, headers) + _frame(_DATA, _END_STREAM, 1, data)


def is_serving(host: str, port: int, service: bytes = b"liveness", timeout_seconds: float = 4.0) -> bool:
    """Return whether the service is SERVING. Raises OSError if the server does not answer."""
    with socket.create_connection((host, port), timeout_seconds) as connection, connection.makefile("rb") as answer:
        connection.sendall(_request(service))
        while len(head := answer.read(9)) == 9:
            payload = answer.read(int.from_bytes(head[:3], "big"))
            if head[3] == _DATA:
                return payload[5:] == _SERVING
            if head[3] == _HEADERS and head[4] & _END_STREAM:  # trailers-only: a status without a message
                return False
    return False


if __name__ == "__main__":
    try:
        healthy = is_serving(sys.argv[1], int(sys.argv[2]))
    except OSError as error:
        sys.exit(f"no answer: {error}")
    sys.exit(0 if healthy else "not serving")
