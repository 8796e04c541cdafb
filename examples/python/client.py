"""Calls lineclear with stubs of protoc alone: python client.py [TARGET]"""

import sys
from pathlib import Path

import grpc
from google.rpc import error_details_pb2, status_pb2

from lineclear.v1 import inference_pb2 as pb
from lineclear.v1 import inference_pb2_grpc
from lineclear.v1 import sampling_pb2 as sampling

CAPITALS = ("France", "Japan")
ENDLESS = sampling.SamplingParams(max_tokens=1000, ignore_eos=True)


def capital(country: str) -> pb.GenerateRequest:
    """Return a request with a short answer, the same each time."""
    return pb.GenerateRequest(
        text=f"The capital of {country} is", sampling=sampling.SamplingParams(max_tokens=4, temperature=0)
    )


target = sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"
config = (Path(__file__).parents[1] / "service_config.json").read_text()
channel = grpc.insecure_channel(target, options=[("grpc.service_config", config), ("grpc.keepalive_time_ms", 30_000)])
client = inference_pb2_grpc.InferenceServiceStub(channel)

# Unary.
print("model: context of", client.GetModel(pb.GetModelRequest(), timeout=60).context_length, "tokens")

# A stream: each response has the tokens that are new.
text = ""
for response in client.Generate(capital("France"), timeout=60):
    text += response.text
    if response.HasField("finished"):
        print(f"answer:{text}, {response.finished.usage.completion_tokens} tokens")

# A session: many answers over one call. Tokens in the middle of an answer are rows, all else is an event.
submits = [pb.SubmitCommand(handle=n, request=capital(country)) for n, country in enumerate(CAPITALS)]
texts = [""] * len(submits)
for message in client.Session(iter([pb.SessionRequest(submits=submits)]), timeout=60):
    for handle, part in zip(message.handles, message.texts, strict=False):
        texts[handle] += part
    for event in message.events:
        if event.HasField("error"):
            sys.exit(event.error.message)
        texts[event.handle] += event.response.text
for n, answer in enumerate(texts):
    print(f"session: {n}{answer}")

# A deadline ends the request at the server, too.
try:
    for _ in client.Generate(pb.GenerateRequest(text="Once upon a time", sampling=ENDLESS), timeout=0.1):
        pass
except grpc.RpcError as error:
    print("deadline: code", error.code().value[0])

# Cancelling the call does as well.
call = client.Generate(pb.GenerateRequest(text="Once upon a time", sampling=ENDLESS), timeout=60)
try:
    for _ in call:
        call.cancel()
except grpc.RpcError as error:
    print("cancelled: code", error.code().value[0])

# The details of an error are messages.
try:
    list(client.Generate(pb.GenerateRequest(text="word " * 3000), timeout=60))
except grpc.RpcError as error:
    trailer = dict(error.trailing_metadata())["grpc-status-details-bin"]
    print("refused: code", error.code().value[0])
    for detail in status_pb2.Status.FromString(trailer).details:
        info, bad = error_details_pb2.ErrorInfo(), error_details_pb2.BadRequest()
        if detail.Unpack(info):
            print(f"reason: {info.reason}, context_length {info.metadata['context_length']}")
        if detail.Unpack(bad):
            print("field:", bad.field_violations[0].field)
