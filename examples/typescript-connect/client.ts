// Calls lineclear with Connect over gRPC: npm start [TARGET]
import { create, type MessageInitShape } from "@bufbuild/protobuf";
import { Code, ConnectError, createClient } from "@connectrpc/connect";
import { createGrpcTransport } from "@connectrpc/connect-node";
import { BadRequestSchema, ErrorInfoSchema } from "./gen/google/rpc/error_details_pb";
import { type GenerateRequestSchema, InferenceService, SessionRequestSchema } from "./gen/lineclear/v1/inference_pb";

type Request = MessageInitShape<typeof GenerateRequestSchema>;
const baseUrl = `http://${process.argv[2] ?? "127.0.0.1:50051"}`;
const transport = createGrpcTransport({ baseUrl, pingIntervalMs: 30_000, pingTimeoutMs: 10_000, defaultTimeoutMs: 60_000 });
const client = createClient(InferenceService, transport);

// A request with a short answer, the same each time.
const capital = (country: string): Request => ({
  prompt: { case: "text", value: `The capital of ${country} is` },
  sampling: { maxTokens: 4, temperature: 0 },
});
const endless: Request = {
  prompt: { case: "text", value: "Once upon a time" },
  sampling: { maxTokens: 1000, ignoreEos: true },
};

// Repeats a call that failed before its first response, while the server is unavailable: Connect has no retry policy.
async function* retrying<T>(call: () => AsyncIterable<T>): AsyncGenerator<T> {
  for (let attempt = 1, isFirst = true; ; attempt++) {
    try {
      for await (const response of call()) {
        isFirst = false;
        yield response;
      }
      return;
    } catch (error) {
      if (!isFirst || attempt === 5 || ConnectError.from(error).code !== Code.Unavailable) throw error;
      await new Promise((resolve) => setTimeout(resolve, 100 * 2 ** attempt));
    }
  }
}

// Unary.
console.log(`model: context of ${(await client.getModel({})).contextLength} tokens`);

// A stream: each response has the tokens that are new.
let text = "";
for await (const response of retrying(() => client.generate(capital("France")))) {
  text += response.text;
  if (response.finished) console.log(`answer:${text}, ${response.finished.usage?.completionTokens} tokens`);
}

// A session: many answers over one call. Tokens in the middle of an answer are rows, all else is an event.
const texts = ["", ""];
async function* commands() {
  const submits = ["France", "Japan"].map((country, n) => ({ handle: BigInt(n), request: capital(country) }));
  yield create(SessionRequestSchema, { submits });
}
for await (const message of client.session(commands())) {
  message.texts.forEach((part, i) => (texts[Number(message.handles[i])] += part));
  for (const { handle, event } of message.events) {
    if (event.case === "error") throw new Error(event.value.message);
    texts[Number(handle)] += event.value?.text ?? "";
  }
}
texts.forEach((answer, n) => console.log(`session: ${n}${answer}`));

// A deadline ends the request at the server, too.
try {
  for await (const _ of client.generate(endless, { timeoutMs: 100 }));
} catch (error) {
  console.log(`deadline: code ${ConnectError.from(error).code}`);
}

// Cancelling the call does as well.
const controller = new AbortController();
try {
  for await (const _ of client.generate(endless, { signal: controller.signal })) controller.abort();
} catch (error) {
  console.log(`cancelled: code ${ConnectError.from(error).code}`);
}

// The details of an error are messages.
try {
  for await (const _ of client.generate({ prompt: { case: "text", value: "word ".repeat(3000) } }));
} catch (caught) {
  const error = ConnectError.from(caught);
  console.log(`refused: code ${error.code}`);
  for (const info of error.findDetails(ErrorInfoSchema)) {
    console.log(`reason: ${info.reason}, context_length ${info.metadata.context_length}`);
  }
  for (const bad of error.findDetails(BadRequestSchema)) console.log(`field: ${bad.fieldViolations[0].field}`);
}
