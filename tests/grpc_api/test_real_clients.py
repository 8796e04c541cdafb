"""Foreign clients against a running server: grpc-js, and buf with protobuf-es."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

from support.npm import find_buf, install
from support.processes import Running
from support.sources import REPOSITORY
from support.time_limits import PATIENCE_SECONDS

from lineclear.v1 import inference_pb2 as pb

PROTOBUF_ES = ("@bufbuild/protoc-gen-es@2.9.0", "@bufbuild/protobuf@2.9.0")
GRPC_JS = ("@grpc/grpc-js@1.14.7", "@grpc/proto-loader@0.8.0")
GRPC_JS_PROGRAM = Path(__file__).with_name("grpc_js.js")
SLOW = {"min_step_seconds": 0.01, "max_step_seconds": 0.01}
SERVICE = "lineclear.v1.InferenceService"


def output_of(*command: str, fails: bool = False, **environment: str) -> str:
    """Return the output of a command that must succeed; of one that must fail, its errors."""
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_SECONDS, env=os.environ | environment
    )
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


def test_grpc_js_streams_cancels_and_has_deadlines(start: Callable[..., Running]) -> None:
    modules = install("grpc-js", *GRPC_JS) / "node_modules"
    server = start(**SLOW)
    node = shutil.which("node") or "node"
    printed = output_of(
        *(node, str(GRPC_JS_PROGRAM), str(REPOSITORY / "protos"), str(REPOSITORY / "third_party")),
        server.address,
        NODE_PATH=str(modules),
    )
    results: dict[str, Any] = {line["name"]: line for line in map(json.loads, printed.splitlines())}
    assert results["model"]["code"] == 0
    assert results["model"]["answer"]["context_length"] > 0
    assert (results["whole"]["code"], results["whole"]["tokens"]) == (0, 5)
    assert results["whole"]["finished"]["finish_reason"] == pb.FINISH_REASON_LENGTH
    assert results["cancelled"]["code"] == 1
    assert results["cancelled"]["tokens"] < 400
    assert results["late"]["code"] == 4
    assert results["wrong"]["code"] == 3
    assert "top_p" in results["wrong"]["details"]
    server.wait_for("request_ended", outcome="cancelled")


def generated(out: Path) -> subprocess.CompletedProcess[str]:
    """Generate the public API with buf and buf.gen.yaml, then import it in Node.js."""
    modules = install("protobuf-es", *PROTOBUF_ES) / "node_modules"
    path = os.pathsep.join((str(modules / ".bin"), os.environ["PATH"]))
    template = str(REPOSITORY / "buf.gen.yaml")
    output_of(find_buf(), "generate", str(REPOSITORY / "protos"), "--template", template, "-o", str(out), PATH=path)
    (out / "package.json").write_text('{"type": "module"}')
    (out / "node_modules").symlink_to(modules)
    (out / "main.js").write_text(
        "import { create, toBinary, fromBinary } from '@bufbuild/protobuf';\n"
        "import * as inference from './gen/lineclear/v1/inference_pb.js';\n"
        "import * as admin from './gen/lineclear/v1/admin_pb.js';\n"
        "const error = { handle: 7n, event: { case: 'error', value: { code: 8, message: 'full' } } };\n"
        "const sent = toBinary(inference.SessionResponseSchema, create(inference.SessionResponseSchema,\n"
        "  { events: [error] }));\n"
        "const names = [inference.InferenceService, admin.AdminService].map((service) => service.typeName);\n"
        "console.log(fromBinary(inference.SessionResponseSchema, sent).events[0].event.value.message, ...names);\n"
    )
    node = shutil.which("node") or "node"
    return subprocess.run([node, "main.js"], cwd=out, capture_output=True, text=True, timeout=PATIENCE_SECONDS)


def test_buf_generates_javascript_that_can_be_imported(tmp_path: Path) -> None:
    done = generated(tmp_path)
    assert done.stdout.split() == ["full", SERVICE, "lineclear.v1.AdminService"], done.stderr
