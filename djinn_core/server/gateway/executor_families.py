"""Metric families of what executors report, by the names of its parts: each is shown as `djinn_executor_` and its name."""

from __future__ import annotations

from typing import Final

import attrs


@attrs.frozen
class ExecutorFamily:
    """Metric family of executors.

    Attributes:
        name: name in the report; a counter is shown with `_total` after it.
        text: what it counts or measures.
        labels: names of its labels beside those of all families of executors.
    """

    name: str
    text: str
    labels: tuple[str, ...] = ()


COUNTERS: Final = (
    ExecutorFamily("sessions_started", "Sessions that began"),
    ExecutorFamily("sessions_ended", "Sessions that ended"),
    ExecutorFamily("sessions_resumed", "Sessions that went on over another connection"),
    ExecutorFamily("sessions_closed", "Sessions that the server ended, by reason", ("reason",)),
    ExecutorFamily("sessions_recovered", "Sessions that were recovered from their journals"),
    ExecutorFamily("recovery_failures", "Sessions that could not be recovered"),
    ExecutorFamily("replayed_frames", "Messages of journals that were replayed"),
    ExecutorFamily("journal_snapshots", "Journals that were replaced by a snapshot"),
    ExecutorFamily("messages", "Messages that came, by type", ("type",)),
    ExecutorFamily("submissions", "Submissions that were answered"),
    ExecutorFamily("submissions_refused", "Submissions that could not be run at all"),
    ExecutorFamily("submissions_stopped", "Submissions that were cancelled"),
    ExecutorFamily("cancel_requests", "Requests of clients to cancel submissions"),
    ExecutorFamily("submission_yields", "Submissions that let another session compute in the middle"),
    ExecutorFamily("ops", "Ops of all submissions"),
    ExecutorFamily("op_failures", "Ops that failed, by cause", ("cause",)),
    ExecutorFamily("poisoned_results", "Values that a client fetched and that a failed op had left undefined"),
    ExecutorFamily("described_values", "Values whose metadata a client asked for because it could not infer it"),
    ExecutorFamily("layout_corrections", "Results that were laid out anew, as a client had predicted them"),
    ExecutorFamily("fetched_tensors", "Tensors sent to clients"),
    ExecutorFamily("fetched_bytes", "Bytes of tensors sent to clients"),
    ExecutorFamily("received_bytes", "Bytes received beside messages: tensors"),
    ExecutorFamily("queue_seconds", "Seconds that submissions waited for the device"),
    ExecutorFamily("decode_seconds", "Seconds of reading submissions"),
    ExecutorFamily("execute_seconds", "Seconds of running submissions"),
    ExecutorFamily("encode_seconds", "Seconds of getting results ready"),
    ExecutorFamily("cpu_seconds", "Processor seconds of the process"),
    ExecutorFamily("tickets_refused", "Connections without a valid ticket"),
    ExecutorFamily("quota_refusals", "Sessions and submissions refused because the tenant had used up what it may"),
    ExecutorFamily("template_cache_hits", "Submissions whose template was in the session's cache"),
    ExecutorFamily("template_cache_misses", "Templates that were new to a session"),
    ExecutorFamily("templates_compiled", "Templates that no session of the executor had compiled before"),
    ExecutorFamily("template_requests", "Templates that a client had to be asked for"),
    ExecutorFamily("template_prepare_seconds", "Seconds of making new templates runnable"),
    ExecutorFamily("compilations", "Attempts of compilers at a template"),
    ExecutorFamily("compilation_failures", "Attempts of compilers that raised an error"),
    ExecutorFamily("compilation_seconds", "Seconds that compilers took"),
    ExecutorFamily("compilations_unused", "Compiled templates that were dropped: wrong, no faster, or never run again"),
    ExecutorFamily("compiled_runs", "Runs of templates in which compiled code took the place of ops"),
    ExecutorFamily("evictions", "Values whose memory was taken to make room"),
    ExecutorFamily("spills", "Values that were written to the spill space"),
    ExecutorFamily("spilled_bytes", "Bytes written to the spill space"),
    ExecutorFamily("restores", "Evicted values that were read back"),
    ExecutorFamily("restored_bytes", "Bytes of evicted values that were read back"),
    ExecutorFamily(
        "dropped_weights",
        "Values that were evicted without being written, because they can be read again from their file",
    ),
    ExecutorFamily("reread_bytes", "Bytes of these that were read again"),
    ExecutorFamily("recomputed_values", "Evicted values that were computed again instead of being read back"),
    ExecutorFamily("memory_refusals", "Allocations for which no room could be made"),
    ExecutorFamily("memory_pressure_changes", "How often each level of memory pressure was entered", ("level",)),
    ExecutorFamily("store_hits", "Weights that were in the store, so that no client had to send them"),
    ExecutorFamily("store_hit_bytes", "Bytes of weights that no client had to send"),
    ExecutorFamily("store_misses", "Weights that were not in the store"),
    ExecutorFamily("store_evictions", "Weights that were removed from the store to make room"),
    ExecutorFamily("weight_reads", "Tensors that the executor read itself, from addresses that clients named"),
    ExecutorFamily("weight_read_bytes", "Bytes of these tensors"),
    ExecutorFamily("shared_weight_hits", "Tensors that were to be read and were in memory for another session"),
    ExecutorFamily("shared_weight_hit_bytes", "Bytes of these tensors"),
    ExecutorFamily("peer_transfers_sent", "Transfers of values to other executors of a pool"),
    ExecutorFamily("peer_transfers_received", "Transfers of values from other executors of a pool"),
    ExecutorFamily("peer_sent_bytes", "Bytes sent to other executors of a pool"),
)
GAUGES: Final = (
    ExecutorFamily("values", "Live values"),
    ExecutorFamily("memory_bytes", "Bytes of live values"),
    ExecutorFamily("poisoned_values", "Live values that a failed op left undefined"),
    ExecutorFamily("threads", "Threads of the process"),
    ExecutorFamily("resident_memory_bytes", "Resident memory of the process"),
    ExecutorFamily("open_fds", "Open file descriptors of the process"),
    ExecutorFamily("waiting_sessions", "Sessions that wait for the device"),
    ExecutorFamily("longest_wait_seconds", "How long the first of them has waited"),
    ExecutorFamily("phase_sessions", "Sessions by the phase of their last program", ("phase",)),
    ExecutorFamily("templates", "Templates that sessions keep"),
    ExecutorFamily("template_instructions", "Ops of the templates that sessions keep"),
    ExecutorFamily("compiled_templates", "Templates that run compiled"),
    ExecutorFamily("compiling_templates", "Templates that a compiler works on, or whose compiled form is being tried"),
    ExecutorFamily("memory_limit_bytes", "Bytes that sessions may hold in memory together"),
    ExecutorFamily("memory_reserve_bytes", "Of these, what is left to ops beside their results"),
    ExecutorFamily("memory_peak_bytes", "The most bytes of values that were in memory at a time"),
    ExecutorFamily("process_memory_peak_bytes", "The most bytes that values and ops took of the process's memory"),
    ExecutorFamily("memory_pressure_level", "Memory pressure: 0 none, 1 a warning, 2 values were evicted"),
    ExecutorFamily("memory_budget_bytes", "Memory budget of a kind of values, by phase", ("phase", "kind")),
    ExecutorFamily("working_set_bytes", "Bytes that the sessions' last programs used, by kind of value", ("kind",)),
    ExecutorFamily("kv_cache_bytes", "Bytes of live KV caches"),
    ExecutorFamily("kv_cache_pinned_bytes", "Bytes of KV caches that clients have pinned in memory"),
    ExecutorFamily("evicted_bytes", "Bytes of live values whose memory was taken"),
    ExecutorFamily(
        "memory_shared_bytes",
        "Bytes of weights that sessions of an executor with a memory limit hold more than once, and have once",
    ),
    ExecutorFamily("spill_bytes", "Bytes in the spill space"),
    ExecutorFamily("idle_bytes", "Bytes of values that idle sessions have in the host's memory or on disk"),
    ExecutorFamily("store_weights", "Weights that are kept on disk"),
    ExecutorFamily("shared_weight_bytes", "Bytes of tensors that the executor read itself and no session has written"),
    ExecutorFamily("store_bytes", "Bytes of weights that are kept on disk"),
    ExecutorFamily("store_limit_bytes", "Bytes of weights that may be kept on disk"),
    ExecutorFamily("disk_bytes", "Bytes of journals, and of values that had to make room in memory, on disk"),
    ExecutorFamily("journals", "Sessions that have a journal"),
    ExecutorFamily("journal_bytes", "Bytes of journals"),
    ExecutorFamily("peer_pending_bytes", "Bytes sent to other executors that these have not acknowledged"),
)
DISTRIBUTIONS: Final = (
    ExecutorFamily("queue_duration_seconds", "How long submissions waited for the device"),
    ExecutorFamily("run_duration_seconds", "How long submissions ran"),
)
