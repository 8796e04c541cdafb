"""Lets a model call a function until it answers with text: python examples/tool_loop.py "What is 2 + 40?" """

import sys

from lineclear.client import ChatMessage, Client

ADD = {
    "name": "add",
    "description": "Returns the sum of two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
FUNCTIONS = {"add": lambda a, b: a + b}
MAX_ROUNDS = 5


def answer(client: Client, question: str) -> str:
    """Return the text of the answer after the calls that the model makes."""
    messages = [ChatMessage("user", question)]
    for _ in range(MAX_ROUNDS):
        reply = client.generate(messages, tools=[ADD], max_tokens=256)
        if not reply.tool_calls:
            return reply.text
        messages.append(reply.message)
        for call in reply.tool_calls:
            try:
                result = str(FUNCTIONS[call.name](**call.parsed()))
            except (TypeError, ValueError) as error:  # the model reads the error and can correct the call
                result = f"error: {error}"
            messages.append(ChatMessage("tool", result, tool_call_id=call.id, name=call.name))
    return f"no answer after {MAX_ROUNDS} rounds"


if __name__ == "__main__":
    with Client() as client:
        print(answer(client, sys.argv[1] if len(sys.argv) > 1 else "What is 2 + 40?"))
