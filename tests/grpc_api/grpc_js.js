// A client in grpc-js: prints one line of JSON for each call. Arguments: the folders with .proto files, the target.
const grpc = require('@grpc/grpc-js');
const loader = require('@grpc/proto-loader');

const [folder, imports, target] = process.argv.slice(2);
const options = { includeDirs: [folder, imports], keepCase: true, defaults: true, longs: Number, oneofs: true };
const definition = loader.loadSync(folder + '/lineclear/v1/inference.proto', options);
const { InferenceService } = grpc.loadPackageDefinition(definition).lineclear.v1;
const client = new InferenceService(target, grpc.credentials.createInsecure());

function unary(method, request) {
  return new Promise((resolve) => client[method](request, (error, answer) => resolve({ code: error ? error.code : 0, answer })));
}

// Reads a stream to its end. `cancelAfter` messages the client hangs up.
function stream(request, options = {}, cancelAfter = Infinity) {
  return new Promise((resolve) => {
    const result = { code: 0, tokens: 0, finished: null };
    const call = client.Generate(request, options);
    let messages = 0;
    call.on('data', (message) => {
      result.tokens += message.token_ids.length;
      result.finished = message.finished || result.finished;
      if (++messages === cancelAfter) call.cancel();
    });
    call.on('error', (error) => { result.code = error.code; result.details = error.details; });
    call.on('status', () => setImmediate(() => resolve(result)));
  });
}

async function main() {
  const say = (name, value) => console.log(JSON.stringify({ name, ...value }));
  const endless = { text: 'once', sampling: { max_tokens: 400, ignore_eos: true } };
  say('model', await unary('GetModel', {}));
  say('whole', await stream({ text: 'once', sampling: { max_tokens: 5, ignore_eos: true } }));
  say('cancelled', await stream(endless, {}, 2));
  say('late', await stream(endless, { deadline: Date.now() + 300 }));
  say('wrong', await stream({ text: 'once', sampling: { top_p: 7 } }));
  client.close();
}

main();
