// Calls lineclear with grpc-js, which reads the .proto files: npm start [TARGET]
import { readFileSync } from "node:fs";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const types = loader.loadSync(["lineclear/v1/inference.proto", "google/rpc/error_details.proto"], {
  includeDirs: ["../../protos", "../../third_party"],
  keepCase: true,
  longs: Number,
});
const { InferenceService } = (grpc.loadPackageDefinition(types) as any).lineclear.v1;
const client = new InferenceService(process.argv[2] ?? "127.0.0.1:50051", grpc.credentials.createInsecure(), {
  "grpc.service_config": readFileSync("../service_config.json", "utf8"),
  "grpc.keepalive_time_ms": 30_000,
  "grpc.keepalive_timeout_ms": 10_000,
});

// The message of a name and its bytes.
const decode = (name: string, bytes: Buffer): any => (types[name] as loader.MessageTypeDefinition<any, any>).deserialize(bytes);
const within = (milliseconds: number) => ({ deadline: Date.now() + milliseconds });
// A request with a short answer, the same each time.
const capital = (country: string) => ({ text: `The capital of ${country} is`, sampling: { max_tokens: 4, temperature: 0 } });
const endless = { text: "Once upon a time", sampling: { max_tokens: 1000, ignore_eos: true } };

// Unary.
const model: any = await new Promise((resolve, reject) =>
  client.GetModel({}, within(60_000), (error: Error | null, answer: unknown) => (error ? reject(error) : resolve(answer))),
);
console.log(`model: context of ${model.context_length} tokens`);

// A stream: each response has the tokens that are new.
let text = "";
for await (const response of client.Generate(capital("France"), within(60_000))) {
  text += response.text ?? "";
  if (response.finished) console.log(`answer:${text}, ${response.finished.usage.completion_tokens} tokens`);
}

// A session: many answers over one call. Tokens in the middle of an answer are rows, all else is an event.
const session = client.Session(within(60_000));
session.write({ submits: ["France", "Japan"].map((country, handle) => ({ handle, request: capital(country) })) });
session.end();
const texts = ["", ""];
for await (const message of session) {
  message.texts?.forEach((part: string, i: number) => (texts[message.handles[i]] += part));
  for (const event of message.events ?? []) {
    if (event.error) throw new Error(event.error.message);
    texts[event.handle ?? 0] += event.response.text ?? "";
  }
}
texts.forEach((answer, n) => console.log(`session: ${n}${answer}`));

// A deadline ends the request at the server, too.
try {
  for await (const _ of client.Generate(endless, within(100)));
} catch (error: any) {
  console.log(`deadline: code ${error.code}`);
}

// Cancelling the call does as well.
const call = client.Generate(endless, within(60_000));
try {
  for await (const _ of call) call.cancel();
} catch (error: any) {
  console.log(`cancelled: code ${error.code}`);
}

// The details of an error are messages.
try {
  for await (const _ of client.Generate({ text: "word ".repeat(3000) }, within(60_000)));
} catch (error: any) {
  console.log(`refused: code ${error.code}`);
  const status = decode("google.rpc.Status", error.metadata.get("grpc-status-details-bin")[0]);
  for (const { type_url, value } of status.details) {
    const detail = decode(type_url.split("/")[1], value);
    if (type_url.endsWith("ErrorInfo")) console.log(`reason: ${detail.reason}, context_length ${detail.metadata.context_length}`);
    if (type_url.endsWith("BadRequest")) console.log(`field: ${detail.field_violations[0].field}`);
  }
}
client.close();
