# Calls lineclear: ruby -I gen client.rb [TARGET]
require "google/protobuf/well_known_types"
require "google/rpc/error_details_pb"
require "grpc"
require "lineclear/v1/inference_services_pb"

V1 = Lineclear::V1
ENDLESS = V1::GenerateRequest.new(text: "Once upon a time", sampling: V1::SamplingParams.new(max_tokens: 1000, ignore_eos: true))
CAPITALS = %w[France Japan].freeze

# Returns a request with a short answer, the same each time.
def capital(country)
  sampling = V1::SamplingParams.new(max_tokens: 4, temperature: 0)
  V1::GenerateRequest.new(text: "The capital of #{country} is", sampling: sampling)
end

config = File.read("#{__dir__}/../service_config.json")
options = { "grpc.service_config" => config, "grpc.keepalive_time_ms" => 30_000 }
client = V1::InferenceService::Stub.new(ARGV[0] || "127.0.0.1:50051", :this_channel_is_insecure, channel_args: options, timeout: 60)

# Unary.
puts "model: context of #{client.get_model(V1::GetModelRequest.new).context_length} tokens"

# A stream: each response has the tokens that are new.
text = +""
client.generate(capital("France")).each do |response|
  text << response.text
  puts "answer:#{text}, #{response.finished.usage.completion_tokens} tokens" if response.finished
end

# A session: many answers over one call. Tokens in the middle of an answer are rows, all else is an event.
submits = CAPITALS.each_with_index.map { |country, n| V1::SubmitCommand.new(handle: n, request: capital(country)) }
texts = CAPITALS.map { +"" }
client.session([V1::SessionRequest.new(submits: submits)]).each do |message|
  message.texts.each_with_index { |part, i| texts[message.handles[i]] << part }
  message.events.each do |event|
    abort event.error.message if event.error
    texts[event.handle] << event.response.text
  end
end
texts.each_with_index { |answer, n| puts "session: #{n}#{answer}" }

# A deadline ends the request at the server, too.
begin
  client.generate(ENDLESS, deadline: Time.now + 0.1).each { |_| }
rescue GRPC::BadStatus => e
  puts "deadline: code #{e.code}"
end

# Cancelling the call does as well.
call = client.generate(ENDLESS, return_op: true)
begin
  call.execute.each { |_| call.cancel }
rescue GRPC::BadStatus => e
  puts "cancelled: code #{e.code}"
end

# The details of an error are messages.
begin
  client.generate(V1::GenerateRequest.new(text: "word " * 3000)).each { |_| }
rescue GRPC::BadStatus => e
  puts "refused: code #{e.code}"
  e.to_rpc_status.details.each do |detail|
    if detail.is(Google::Rpc::ErrorInfo)
      info = detail.unpack(Google::Rpc::ErrorInfo)
      puts "reason: #{info.reason}, context_length #{info.metadata["context_length"]}"
    elsif detail.is(Google::Rpc::BadRequest)
      puts "field: #{detail.unpack(Google::Rpc::BadRequest).field_violations[0].field}"
    end
  end
end
