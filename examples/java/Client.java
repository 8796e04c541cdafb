import com.google.gson.Gson;
import com.google.protobuf.Any;
import com.google.rpc.BadRequest;
import com.google.rpc.ErrorInfo;
import com.lineclear.v1.*;
import io.grpc.Context;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import io.grpc.StatusRuntimeException;
import io.grpc.protobuf.StatusProto;
import io.grpc.stub.StreamObserver;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.Map;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.TimeUnit;

/** Calls lineclear: java Client [TARGET] */
public class Client {
    static final GenerateRequest ENDLESS = GenerateRequest.newBuilder().setText("Once upon a time")
        .setSampling(SamplingParams.newBuilder().setMaxTokens(1000).setIgnoreEos(true)).build();

    /** Returns a request with a short answer, the same each time. */
    static GenerateRequest capital(String country) {
        return GenerateRequest.newBuilder().setText("The capital of " + country + " is")
            .setSampling(SamplingParams.newBuilder().setMaxTokens(4).setTemperature(0)).build();
    }

    @SuppressWarnings("unchecked")
    public static void main(String[] arguments) throws Exception {
        String target = arguments.length > 0 ? arguments[0] : "127.0.0.1:50051";
        String config = Files.readString(Path.of("../service_config.json"));
        ManagedChannel channel = ManagedChannelBuilder.forTarget(target).usePlaintext()
            .defaultServiceConfig(new Gson().fromJson(config, Map.class)).enableRetry()
            .keepAliveTime(30, TimeUnit.SECONDS).keepAliveTimeout(10, TimeUnit.SECONDS).build();
        var stub = InferenceServiceGrpc.newBlockingStub(channel);
        var client = stub.withDeadlineAfter(1, TimeUnit.MINUTES);

        // Unary.
        var model = client.getModel(GetModelRequest.getDefaultInstance());
        System.out.printf("model: context of %d tokens%n", model.getContextLength());

        // A stream: each response has the tokens that are new.
        var text = new StringBuilder();
        client.generate(capital("France")).forEachRemaining(response -> {
            text.append(response.getText());
            if (response.hasFinished()) {
                System.out.printf("answer:%s, %d tokens%n", text, response.getFinished().getUsage().getCompletionTokens());
            }
        });

        // A session: many answers over one call. Tokens in the middle of an answer are rows, all else is an event.
        var texts = new StringBuilder[] {new StringBuilder(), new StringBuilder()};
        var ended = new CompletableFuture<Void>();
        var session = InferenceServiceGrpc.newStub(channel).withDeadlineAfter(1, TimeUnit.MINUTES)
            .session(new StreamObserver<SessionResponse>() {
                @Override public void onNext(SessionResponse message) {
                    for (int i = 0; i < message.getTextsCount(); i++) {
                        texts[(int) message.getHandles(i)].append(message.getTexts(i));
                    }
                    for (SessionEvent event : message.getEventsList()) {
                        if (event.hasError()) {
                            throw new IllegalStateException(event.getError().getMessage());
                        }
                        texts[(int) event.getHandle()].append(event.getResponse().getText());
                    }
                }

                @Override public void onError(Throwable error) {
                    ended.completeExceptionally(error);
                }

                @Override public void onCompleted() {
                    ended.complete(null);
                }
            });
        session.onNext(SessionRequest.newBuilder()
            .addSubmits(SubmitCommand.newBuilder().setHandle(0).setRequest(capital("France")))
            .addSubmits(SubmitCommand.newBuilder().setHandle(1).setRequest(capital("Japan"))).build());
        session.onCompleted();
        ended.get();
        for (int n = 0; n < texts.length; n++) {
            System.out.printf("session: %d%s%n", n, texts[n]);
        }

        // A deadline ends the request at the server, too.
        try {
            stub.withDeadlineAfter(100, TimeUnit.MILLISECONDS).generate(ENDLESS).forEachRemaining(response -> { });
        } catch (StatusRuntimeException error) {
            System.out.printf("deadline: code %d%n", error.getStatus().getCode().value());
        }

        // Cancelling the call does as well.
        var cancellable = Context.current().withCancellation();
        try {
            cancellable.run(() -> client.generate(ENDLESS).forEachRemaining(response -> cancellable.cancel(null)));
        } catch (StatusRuntimeException error) {
            System.out.printf("cancelled: code %d%n", error.getStatus().getCode().value());
        }

        // The details of an error are messages.
        try {
            client.generate(GenerateRequest.newBuilder().setText("word ".repeat(3000)).build()).next();
        } catch (StatusRuntimeException error) {
            System.out.printf("refused: code %d%n", error.getStatus().getCode().value());
            for (Any detail : StatusProto.fromThrowable(error).getDetailsList()) {
                if (detail.is(ErrorInfo.class)) {
                    var info = detail.unpack(ErrorInfo.class);
                    System.out.printf("reason: %s, context_length %s%n", info.getReason(), info.getMetadataOrThrow("context_length"));
                } else if (detail.is(BadRequest.class)) {
                    System.out.println("field: " + detail.unpack(BadRequest.class).getFieldViolations(0).getField());
                }
            }
        }
        channel.shutdown();
    }
}
