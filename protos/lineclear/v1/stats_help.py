"""Comments of the statistics in inference.proto. Written by protos/generate.py; do not edit."""

HELP = {
    "GetStatsResponse.uptime": "Time since the scheduler started.",
    "GetStatsResponse.counters": "Counters since the scheduler started.",
    "GetStatsResponse.gauges": "Gauges of this moment.",
    "GetStatsResponse.request_queue_time_seconds": "Seconds from the arrival of a request to its first admission.",
    "GetStatsResponse.time_to_first_token_seconds": "Seconds from the arrival of a request to its first token.",
    "GetStatsResponse.request_mean_inter_token_latency_seconds": "Mean seconds between two tokens of a request: one value per request, not per token.",  # noqa: E501
    "GetStatsResponse.e2e_request_latency_seconds": "Seconds from the arrival of a request to its end.",
    "GetStatsResponse.step_seconds": "Seconds of one step on the worker.",
    "GetStatsResponse.generation_tokens_per_second": "Generated tokens per second over the last ten seconds.",
    "GetStatsResponse.worker": "The worker process; of several, the one that joined first.",
    "GetStatsResponse.batching_strategy": "Batching strategy in use, a value of the setting batching_strategy.",
    "GetStatsResponse.scheduling_policy": "Policy that picks the next request of the queue, a value of the setting scheduling_policy.",  # noqa: E501
    "GetStatsResponse.server_version": "Release of lineclear.",
    "GetStatsResponse.mean_batch_size": "Mean rows of a step since the scheduler started.",
    "GetStatsResponse.prefix_cache_hit_ratio": "Tokens found in the prefix cache since the scheduler started, as a share of the tokens looked up, 0 to 1.",  # noqa: E501
    "GetStatsResponse.workers": "All workers that serve, wait or hang.",
    "WorkerStats.index": "Number of the worker, as worker in the log. If another program starts the workers: the smallest that no other serving worker has, absent until the worker has joined.",  # noqa: E501
    "WorkerStats.state": '"starting" (it has not joined yet), "given_up" (it is not started again), "joined", "stopping" (it has received SIGTERM), "cut_off" (no connection), "unhealthy" and "condemned" (it has to be killed) or "waiting" (for workers of another model, or for a place).',  # noqa: E501
    "WorkerStats.epoch": "Random number of this join, as in the log.",
    "WorkerStats.pid": "Process id, in the worker's PID namespace.",
    "WorkerStats.device": 'Device: "cpu" or the name of the GPU.',
    "WorkerStats.joins": "Workers that have joined with this index so far.",
    "WorkerStats.num_slots": "Most requests in one step.",
    "WorkerStats.num_requests_running": "Requests that run on this worker.",
    "WorkerStats.steps_in_flight": "Steps that are sent and not answered.",
    "WorkerStats.steps": "Steps since it joined.",
    "WorkerStats.step_seconds": "Mean seconds of its steps among the last 1024 of all workers.",
    "WorkerStats.generation_tokens_per_second": "Generated tokens per second over the last ten seconds.",
    "WorkerStats.num_blocks": "KV blocks.",
    "WorkerStats.blocks_used": "KV blocks of running requests.",
    "WorkerStats.blocks_cached": "Free KV blocks that keep a prefix.",
    "WorkerStats.load_seconds": "Seconds from the start of the process, or from its promotion as a standby, until it was ready: mostly imports and loading the model.",  # noqa: E501
    "WorkerStats.weight_bytes": "Bytes of the weights of the model and of the draft model, as loaded: before int8 quantization and packing. With tensor parallelism: of one rank.",  # noqa: E501
    "WorkerStats.kv_cache_bytes": "Bytes of all KV blocks, those of the draft model included, and of recurrent states. On a CPU, memory of blocks that were never used is not taken yet. With tensor parallelism: of one rank.",  # noqa: E501
    "WorkerStats.step_memory_bytes": "Bytes that the largest possible step takes on a GPU besides weights and KV blocks, as measured at the start. 0 on a CPU, and with --num-blocks. With tensor parallelism: of one rank.",  # noqa: E501
    "WorkerStats.swap_memory_bytes": "Bytes of host memory for KV blocks of preempted requests.",
    "WorkerStats.num_state_snapshots": "Snapshots of recurrent states that the worker can keep behind cached blocks. 0 for models without recurrent state.",  # noqa: E501
    "WorkerStats.state_snapshots_used": "Those that keep a state.",
    "WorkerStats.state_snapshot_hits": "Requests since it joined that began with a kept state, behind a cached prefix.",
    "Counters.requests_admitted": "Requests admitted to the queue: those that finished, were cancelled, expired or failed, and those that are live.",  # noqa: E501
    "Counters.requests_rejected": "Requests that ended before they were in the queue, cancelled and expired ones included, and other calls answered with an error.",  # noqa: E501
    "Counters.requests_finished": "Requests that completed their answer. Histograms count these.",
    "Counters.requests_cancelled": "Requests in the queue or later that their client cancelled.",
    "Counters.requests_expired": "Requests in the queue or later that ended at their deadline, whether the client or the server ended them.",  # noqa: E501
    "Counters.requests_failed": "Requests in the queue or later that ended with another error.",
    "Counters.prompt_tokens": "Prompt tokens of requests that left the queue, once for all outputs of a request. At most prefix_cache_queries.",  # noqa: E501
    "Counters.generation_tokens": "Generated tokens: of all outputs, of the candidates of best_of, and of the outputs of a beam search. Without searches, with wasted_samples at most the rows and the accepted drafts.",  # noqa: E501
    "Counters.prefix_cache_hits": "Tokens found in the prefix cache. At most prefix_cache_queries.",
    "Counters.prefix_cache_queries": "Tokens looked up in the prefix cache, each time that a request starts or continues after a preemption or a lost worker, once for all outputs.",  # noqa: E501
    "Counters.recomputed_tokens": "Tokens computed again after a preemption or a worker restart.",
    "Counters.preemptions": "Preemptions: a request gave its KV blocks to another request and continues later.",
    "Counters.steps": "Steps sent to a worker, those of lost workers included.",
    "Counters.rows": "Rows of all steps: one per request and step.",
    "Counters.wasted_samples": "Sampled tokens dropped because their request had ended.",
    "Counters.step_tokens": "Positions computed by all steps: prompt tokens and sampled tokens, those of each beam of a beam search and of blocks that it computes again included.",  # noqa: E501
    "Counters.step_positions": "Positions held by requests, summed over all steps: prompt and output tokens whose keys and values are kept.",  # noqa: E501
    "Counters.spec_decode_num_drafts": "Rows that verified drafts (speculative decoding).",
    "Counters.spec_decode_num_draft_tokens": "Draft tokens that were verified.",
    "Counters.spec_decode_num_accepted_tokens": "Draft tokens that were accepted and are in an answer: each saves a row.",  # noqa: E501
    "Counters.swapped_out_tokens": "Tokens whose keys and values were copied to host memory at a preemption.",
    "Counters.swapped_in_tokens": "Tokens whose keys and values were copied back after a preemption, in place of being computed again. At most swapped_out_tokens.",  # noqa: E501
    "Counters.prefix_cache_stateless_tokens": "Tokens that the prefix cache has but are computed again, because no snapshot of the recurrent state behind them is kept. 0 for models without recurrent state.",  # noqa: E501
    "Gauges.num_requests_waiting": "Requests in the queue.",
    "Gauges.num_tokens_waiting": "Prompt tokens of the requests in the queue.",
    "Gauges.num_requests_running": "Requests that hold a slot of the batch, or whose last token is being computed. A beam search counts once for each beam, from its start to its end.",  # noqa: E501
    "Gauges.steps_in_flight": "Steps sent to the worker without a result yet.",
    "Gauges.num_blocks": "KV blocks of the whole pool.",
    "Gauges.blocks_used": "KV blocks held by running requests.",
    "Gauges.blocks_cached": "Free KV blocks that still hold a cached prefix.",
    "Gauges.kv_cache_usage_ratio": "KV blocks held by running requests, as a share of the pool, 0 to 1.",
    "Gauges.open_streams": "Live requests: each from its arrival until its answer is delivered.",
    "Gauges.asyncio_tasks": "Tasks of the server's asyncio event loop.",
    "Gauges.draining": "Whether the server drains: it admits no new requests.",
    "Gauges.last_step_tokens": "Positions computed by the last step.",
    "Gauges.last_step_positions": "Positions held by requests after the last step.",
    "Gauges.predicted_wait_seconds": "Predicted wait in seconds of a request that arrives now, at the end of the queue. 0 if unknown.",  # noqa: E501
    "Gauges.fairness_index": "Jain's index of the last minute, over tenants that wait at the same time: of each, its tokens by weight as a part of the mean of the tenants that waited in the same seconds. 1 if all were served equally, 1/n if one of n got everything.",  # noqa: E501
    "Gauges.fairness_gap_tokens": "Largest difference between two such tenants in the last minute: the tokens by weight that each got above or below that mean.",  # noqa: E501
    "Gauges.num_lora_adapters": "Loaded LoRA adapters, by name.",
    "Gauges.num_workers_wanted": "Workers that the server keeps running: those that have joined, start or are given up. 0 if another program starts the workers.",  # noqa: E501
    "Gauges.num_workers_joined": "Workers that serve, whichever program has started them.",
    "Gauges.num_workers_starting": "Wanted workers that do not serve yet: they load the model, wait to join, or are started again after an exit.",  # noqa: E501
    "Gauges.num_workers_given_up": "Wanted workers that are not started again.",
    "WorkerStatus.up": "Whether a worker has joined, one whose connection was just lost included.",
    "WorkerStatus.joins": "Workers that have joined since the scheduler started.",
    "WorkerStatus.pid": "Process id of the worker, in the worker's PID namespace.",
    "WorkerStatus.device": 'Device of the worker: "cpu" or "cuda".',
    "WorkerStatus.dtype": 'Data type of the weights: "float32", "bfloat16", "int8" ...',
    "WorkerStatus.attention_backend": "Attention backend in use.",
    "WorkerStatus.torch_version": "Version of PyTorch.",
    "WorkerStatus.transformers_version": "Version of Hugging Face transformers.",
    "WorkerStatus.step_base_seconds": "Step time predicted for an empty step. The three step fields are a linear model fitted to the measured steps: seconds = step_base_seconds + step_seconds_per_token * computed tokens + step_seconds_per_kv_token * KV entries read.",  # noqa: E501
    "WorkerStatus.step_seconds_per_token": "Predicted seconds per computed token.",
    "WorkerStatus.step_seconds_per_kv_token": "Predicted seconds per KV entry that attention reads.",
    "WorkerStatus.forward_pass": 'What computes the layers: "fused", "modules" (of transformers, slower), "fused, CUDA graphs" or "modules, CUDA graphs".',  # noqa: E501
    "WorkerStatus.forward_pass_reason": 'Why "modules"; empty with "fused".',
}
