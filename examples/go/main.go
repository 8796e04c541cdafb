// Calls lineclear: go run . [TARGET]
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"
	"strings"
	"time"

	pb "example/gen/lineclear/v1"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	_ "google.golang.org/grpc/health" // the service config names a health check
	"google.golang.org/grpc/keepalive"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"
)

var endless = &pb.GenerateRequest{
	Prompt:   &pb.GenerateRequest_Text{Text: "Once upon a time"},
	Sampling: &pb.SamplingParams{MaxTokens: proto.Uint32(1000), IgnoreEos: proto.Bool(true)},
}

// capital returns a request with a short answer, the same each time.
func capital(country string) *pb.GenerateRequest {
	return &pb.GenerateRequest{
		Prompt:   &pb.GenerateRequest_Text{Text: "The capital of " + country + " is"},
		Sampling: &pb.SamplingParams{MaxTokens: proto.Uint32(4), Temperature: proto.Float32(0)},
	}
}

// generate passes the responses of a request to each, and returns the error that ended it.
func generate(ctx context.Context, client pb.InferenceServiceClient, request *pb.GenerateRequest, each func(*pb.GenerateResponse)) error {
	stream, err := client.Generate(ctx, request)
	if err != nil {
		return err
	}
	for {
		response, err := stream.Recv()
		if err == io.EOF {
			return nil
		}
		if err != nil {
			return err
		}
		each(response)
	}
}

func must(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

func main() {
	target := "127.0.0.1:50051"
	if len(os.Args) > 1 {
		target = os.Args[1]
	}
	config, err := os.ReadFile("../service_config.json")
	must(err)
	channel, err := grpc.NewClient(target,
		grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithDefaultServiceConfig(string(config)),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{Time: 30 * time.Second, Timeout: 10 * time.Second}))
	must(err)
	defer channel.Close()
	client := pb.NewInferenceServiceClient(channel)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	ignore := func(*pb.GenerateResponse) {}

	// Unary.
	model, err := client.GetModel(ctx, &pb.GetModelRequest{})
	must(err)
	fmt.Println("model: context of", model.ContextLength, "tokens")

	// A stream: each response has the tokens that are new.
	text := ""
	must(generate(ctx, client, capital("France"), func(response *pb.GenerateResponse) {
		text += response.Text
		if response.Finished != nil {
			fmt.Printf("answer:%s, %d tokens\n", text, response.Finished.Usage.CompletionTokens)
		}
	}))

	// A session: many answers over one call. Tokens in the middle of an answer are rows, all else is an event.
	session, err := client.Session(ctx)
	must(err)
	must(session.Send(&pb.SessionRequest{Submits: []*pb.SubmitCommand{
		{Handle: 0, Request: capital("France")},
		{Handle: 1, Request: capital("Japan")},
	}}))
	must(session.CloseSend())
	texts := make([]string, 2)
	for {
		message, err := session.Recv()
		if err == io.EOF {
			break
		}
		must(err)
		for i, part := range message.Texts {
			texts[message.Handles[i]] += part
		}
		for _, event := range message.Events {
			if event.GetError() != nil {
				log.Fatal(event.GetError().Message)
			}
			texts[event.Handle] += event.GetResponse().Text
		}
	}
	for n, answer := range texts {
		fmt.Printf("session: %d%s\n", n, answer)
	}

	// A deadline ends the request at the server, too.
	short, stop := context.WithTimeout(ctx, 100*time.Millisecond)
	defer stop()
	fmt.Printf("deadline: code %d\n", status.Code(generate(short, client, endless, ignore)))

	// Cancelling the call does as well.
	cancellable, hangUp := context.WithCancel(ctx)
	err = generate(cancellable, client, endless, func(*pb.GenerateResponse) { hangUp() })
	fmt.Printf("cancelled: code %d\n", status.Code(err))

	// The details of an error are messages.
	tooLong := &pb.GenerateRequest{Prompt: &pb.GenerateRequest_Text{Text: strings.Repeat("word ", 3000)}}
	refused := status.Convert(generate(ctx, client, tooLong, ignore))
	fmt.Printf("refused: code %d\n", refused.Code())
	for _, detail := range refused.Details() {
		switch detail := detail.(type) {
		case *errdetails.ErrorInfo:
			fmt.Printf("reason: %s, context_length %s\n", detail.Reason, detail.Metadata["context_length"])
		case *errdetails.BadRequest:
			fmt.Println("field:", detail.FieldViolations[0].Field)
		}
	}
}
