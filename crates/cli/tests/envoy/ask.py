"""Asks Envoy's rate limit service with Google's own gRPC client.

Usage: ask.py ADDRESS PROTO_FOLDER. Reads a JSON list of {"path", "request" | "raw", "stream", "metadata"}, where "raw" is
bytes in hex, and prints a JSON list of {"code", "details" | "response" | "raw", "text"}.
"""

import json
import sys
import tempfile

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, json_format, message_factory
from grpc_tools import protoc

RLS = "envoy/service/ratelimit/v3/rls.proto"


def compiled(folder):
    with tempfile.NamedTemporaryFile() as out:
        command = ["protoc", f"-I{folder}", "--include_imports", f"--descriptor_set_out={out.name}", RLS]
        include = protoc.__file__.rsplit("/", 1)[0] + "/_proto"
        assert protoc.main(command[:2] + [f"-I{include}"] + command[2:]) == 0
        return out.read()


def messages(encoded):
    pool = descriptor_pool.DescriptorPool()
    for file in descriptor_pb2.FileDescriptorSet.FromString(encoded).file:
        pool.Add(file)
    of = lambda name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"envoy.service.ratelimit.v3.{name}"))
    return of("RateLimitRequest"), of("RateLimitResponse")


def ask(channel, call, request_type, response_type):
    metadata = [tuple(pair) for pair in call.get("metadata", [])]
    if "request" in call:
        payload = json_format.ParseDict(call["request"], request_type()).SerializeToString()
    else:
        payload = bytes.fromhex(call["raw"])
    kind = channel.stream_stream if call.get("stream") else channel.unary_unary
    method = kind(call["path"], request_serializer=bytes, response_deserializer=bytes)
    try:
        if call.get("stream"):
            answer = next(method(iter([payload]), metadata=metadata, timeout=10))
        else:
            answer = method(payload, metadata=metadata, timeout=10)
    except grpc.RpcError as error:
        return {"code": error.code().name, "details": error.details()}
    if "request" in call:
        response = json_format.MessageToDict(response_type.FromString(answer))
        return {"code": "OK", "response": response}
    return {"code": "OK", "raw": answer.hex(), "text": answer.decode("latin-1")}


def main():
    address, folder, calls = sys.argv[1], sys.argv[2], json.load(sys.stdin)
    encoded = compiled(folder)
    with open(f"{folder}/rls.binpb", "rb") as committed:
        assert committed.read() == encoded, "rls.binpb is not what the .proto files compile to"
    request_type, response_type = messages(encoded)
    with grpc.insecure_channel(address) as channel:
        print(json.dumps([ask(channel, call, request_type, response_type) for call in calls]))


main()
