// Calls lineclear: ./client [TARGET]
#include <grpcpp/grpcpp.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <memory>
#include <sstream>
#include <string>

#include "google/rpc/error_details.pb.h"
#include "google/rpc/status.pb.h"
#include "lineclear/v1/inference.grpc.pb.h"

namespace pb = lineclear::v1;
using namespace std::chrono_literals;

// Returns a request with a short answer, the same each time.
pb::GenerateRequest Capital(const std::string& country) {
  pb::GenerateRequest request;
  request.set_text("The capital of " + country + " is");
  request.mutable_sampling()->set_max_tokens(4);
  request.mutable_sampling()->set_temperature(0);
  return request;
}

pb::GenerateRequest Endless() {
  pb::GenerateRequest request;
  request.set_text("Once upon a time");
  request.mutable_sampling()->set_max_tokens(1000);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

std::unique_ptr<grpc::ClientContext> Within(std::chrono::milliseconds time) {
  auto context = std::make_unique<grpc::ClientContext>();
  context->set_deadline(std::chrono::system_clock::now() + time);
  return context;
}

void Check(const grpc::Status& status) {
  if (!status.ok()) {
    std::cerr << status.error_message() << std::endl;
    std::exit(1);
  }
}

int main(int argc, char** argv) {
  std::stringstream config;
  config << std::ifstream("../service_config.json").rdbuf();
  grpc::ChannelArguments options;
  options.SetServiceConfigJSON(config.str());
  options.SetInt(GRPC_ARG_KEEPALIVE_TIME_MS, 30'000);
  auto channel = grpc::CreateCustomChannel(argc > 1 ? argv[1] : "127.0.0.1:50051", grpc::InsecureChannelCredentials(), options);
  auto client = pb::InferenceService::NewStub(channel);

  // Unary.
  auto context = Within(60s);
  pb::GetModelResponse model;
  Check(client->GetModel(context.get(), {}, &model));
  std::cout << "model: context of " << model.context_length() << " tokens" << std::endl;

  // A stream: each response has the tokens that are new.
  context = Within(60s);
  std::string text;
  pb::GenerateResponse response;
  auto stream = client->Generate(context.get(), Capital("France"));
  while (stream->Read(&response)) {
    text += response.text();
    if (response.has_finished()) {
      std::cout << "answer:" << text << ", " << response.finished().usage().completion_tokens() << " tokens" << std::endl;
    }
  }
  Check(stream->Finish());

  // A session: many answers over one call. Tokens in the middle of an answer are rows, all else is an event.
  context = Within(60s);
  const std::string countries[] = {"France", "Japan"};
  std::string texts[2];
  pb::SessionRequest submits;
  for (int n = 0; n < 2; ++n) {
    auto* submit = submits.add_submits();
    submit->set_handle(n);
    *submit->mutable_request() = Capital(countries[n]);
  }
  auto session = client->Session(context.get());
  session->Write(submits);
  session->WritesDone();
  pb::SessionResponse message;
  while (session->Read(&message)) {
    for (int i = 0; i < message.texts_size(); ++i) texts[message.handles(i)] += message.texts(i);
    for (const auto& event : message.events()) {
      if (event.has_error()) Check({grpc::StatusCode(event.error().code()), event.error().message()});
      texts[event.handle()] += event.response().text();
    }
  }
  Check(session->Finish());
  for (int n = 0; n < 2; ++n) std::cout << "session: " << n << texts[n] << std::endl;

  // A deadline ends the request at the server, too.
  context = Within(100ms);
  stream = client->Generate(context.get(), Endless());
  while (stream->Read(&response)) {
  }
  std::cout << "deadline: code " << stream->Finish().error_code() << std::endl;

  // Cancelling the call does as well.
  context = Within(60s);
  stream = client->Generate(context.get(), Endless());
  while (stream->Read(&response)) context->TryCancel();
  std::cout << "cancelled: code " << stream->Finish().error_code() << std::endl;

  // The details of an error are messages.
  context = Within(60s);
  pb::GenerateRequest too_long;
  for (int n = 0; n < 3000; ++n) *too_long.mutable_text() += "word ";
  stream = client->Generate(context.get(), too_long);
  while (stream->Read(&response)) {
  }
  grpc::Status refused = stream->Finish();
  std::cout << "refused: code " << refused.error_code() << std::endl;
  google::rpc::Status status;
  status.ParseFromString(refused.error_details());
  for (const auto& detail : status.details()) {
    google::rpc::ErrorInfo info;
    google::rpc::BadRequest bad;
    if (detail.UnpackTo(&info)) {
      std::cout << "reason: " << info.reason() << ", context_length " << info.metadata().at("context_length") << std::endl;
    } else if (detail.UnpackTo(&bad)) {
      std::cout << "field: " << bad.field_violations(0).field() << std::endl;
    }
  }
}
