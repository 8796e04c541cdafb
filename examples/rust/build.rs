//! Generates the stubs, with protoc in the PATH.

fn main() -> std::io::Result<()> {
    tonic_prost_build::configure()
        .build_server(false)
        .extern_path(".google.rpc.Status", "::tonic_types::Status")
        .compile_protos(&["../../protos/lineclear/v1/inference.proto"], &["../../protos", "../../third_party"])
}
