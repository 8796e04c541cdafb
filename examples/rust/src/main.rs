//! Calls lineclear: cargo run [TARGET]

use pb::generate_request::Prompt;
use pb::inference_service_client::InferenceServiceClient;
use pb::session_event::Event;
use std::time::Duration;
use tonic::transport::{Channel, Endpoint};
use tonic::{Code, Request, Status, Streaming};
use tonic_types::StatusExt;

mod pb {
    tonic::include_proto!("lineclear.v1");
}

type Client = InferenceServiceClient<Channel>;

/// Returns a request with a short answer, the same each time.
fn capital(country: &str) -> pb::GenerateRequest {
    request(
        format!("The capital of {country} is"),
        pb::SamplingParams { max_tokens: Some(4), temperature: Some(0.0), ..Default::default() },
    )
}

fn endless() -> pb::GenerateRequest {
    let sampling = pb::SamplingParams { max_tokens: Some(1000), ignore_eos: Some(true), ..Default::default() };
    request("Once upon a time".into(), sampling)
}

fn request(text: String, sampling: pb::SamplingParams) -> pb::GenerateRequest {
    pb::GenerateRequest { prompt: Some(Prompt::Text(text)), sampling: Some(sampling), ..Default::default() }
}

/// Starts a request. tonic reads no service config: this repeats the call while the server is unavailable.
async fn generate(client: &Client, message: pb::GenerateRequest, timeout: Duration) -> Result<Streaming<pb::GenerateResponse>, Status> {
    let mut pause = Duration::from_millis(200);
    for _ in 1..5 {
        let mut request = Request::new(message.clone());
        request.set_timeout(timeout);
        match client.clone().generate(request).await {
            Err(status) if status.code() == Code::Unavailable => tokio::time::sleep(pause).await,
            result => return result.map(|response| response.into_inner()),
        }
        pause *= 2;
    }
    client.clone().generate(message).await.map(|response| response.into_inner())
}

/// Reads a stream to its end.
async fn drain(client: &Client, message: pb::GenerateRequest, timeout: Duration) -> Result<(), Status> {
    let mut stream = generate(client, message, timeout).await?;
    while stream.message().await?.is_some() {}
    Ok(())
}

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let target = std::env::args().nth(1).unwrap_or("127.0.0.1:50051".into());
    let channel = Endpoint::from_shared(format!("http://{target}"))?
        .http2_keep_alive_interval(Duration::from_secs(30))
        .keep_alive_timeout(Duration::from_secs(10))
        .connect_lazy();
    let mut client = Client::new(channel);
    let minute = Duration::from_secs(60);

    // Unary.
    let model = client.get_model(pb::GetModelRequest {}).await?.into_inner();
    println!("model: context of {} tokens", model.context_length);

    // A stream: each response has the tokens that are new.
    let mut stream = generate(&client, capital("France"), minute).await?;
    let mut text = String::new();
    while let Some(response) = stream.message().await? {
        text += &response.text;
        if let Some(finished) = response.finished {
            println!("answer:{text}, {} tokens", finished.usage.unwrap_or_default().completion_tokens);
        }
    }

    // A session: many answers over one call. Tokens in the middle of an answer are rows, all else is an event.
    let submit = |handle, country| pb::SubmitCommand { handle, request: Some(capital(country)), ..Default::default() };
    let submits = pb::SessionRequest { submits: vec![submit(0, "France"), submit(1, "Japan")], cancels: vec![] };
    let mut session = client.session(tokio_stream::iter([submits])).await?.into_inner();
    let mut texts = [String::new(), String::new()];
    while let Some(message) = session.message().await? {
        for (handle, part) in message.handles.iter().zip(&message.texts) {
            texts[*handle as usize] += part;
        }
        for event in message.events {
            match event.event {
                Some(Event::Response(response)) => texts[event.handle as usize] += &response.text,
                Some(Event::Error(error)) => return Err(error.message.into()),
                None => {}
            }
        }
    }
    for (n, answer) in texts.iter().enumerate() {
        println!("session: {n}{answer}");
    }

    // A deadline ends the request at the server, too.
    if let Err(status) = drain(&client, endless(), Duration::from_millis(100)).await {
        println!("deadline: code {}", status.code() as i32);
    }

    // Dropping the stream cancels the call.
    let mut stream = generate(&client, endless(), minute).await?;
    stream.message().await?;
    drop(stream);
    println!("cancelled: code {}", Code::Cancelled as i32);

    // The details of an error are messages.
    if let Err(status) = drain(&client, request("word ".repeat(3000), Default::default()), minute).await {
        println!("refused: code {}", status.code() as i32);
        let details = status.get_error_details();
        if let Some(info) = details.error_info() {
            println!("reason: {}, context_length {}", info.reason, info.metadata["context_length"]);
        }
        if let Some(bad) = details.bad_request() {
            println!("field: {}", bad.field_violations[0].field);
        }
    }
    Ok(())
}
