"""Every term and symbol that the pages use, in one or two plain sentences. `TERMS` is in the order in which one may read it."""

from __future__ import annotations

from typing import NamedTuple


class Term(NamedTuple):
    """What a term means. `symbol` is as the papers write it, "" where there is none; several are parted by a comma."""

    text: str
    symbol: str = ""


TERMS: dict[str, Term] = {
    "token": Term("A word or a piece of one: what a model reads and writes one at a time."),
    "layer": Term("One of the model's stages, counted from 0; layer 0 is next to the words. Each has several heads."),
    "head": Term(
        "A part of a layer that looks back over the text on its own. A query head asks; a KV head stores keys and values."
    ),
    "group": Term("The query heads that share one KV head.", "g"),
    "query": Term("What a token asks of the tokens before it, as a list of numbers.", "q"),
    "query mean": Term(
        "The average query of a head over the prompt: what CapKV and Expected Attention expect of the queries to come. Σ_q is "
        "its covariance.",
        "μ_q, Σ_q",
    ),
    "key": Term("What a token is found by: a query pays attention to the tokens whose keys point its way.", "k"),
    "value": Term("What a token says when it is found.", "v"),
    "attention": Term(
        "How a query's interest spreads over the tokens: shares that add up to 1. Also a head's output, the values weighted by "
        "these shares.",
        "α",
    ),
    "attention received": Term("Attention that a key got, summed over all queries that can see it.", "Σ α"),
    "KV cache": Term(
        "Keys and values of all tokens read so far, kept in memory so that they need not be worked out again. It grows with "
        "every token."
    ),
    "entry": Term("One token's key and value in one KV head."),
    "eviction": Term(
        "Taking entries out of the cache for good, to save memory. Another head may still keep the same token."
    ),
    "policy": Term(
        "A way to evict: what scores the entries, how the budget is spread, what is protected, what is put back."
    ),
    "full cache": Term("Nothing is evicted: the reference that every policy is compared with."),
    "budget": Term("Entries that each head may keep, averaged over the model, sinks and window included."),
    "share removed": Term("Entries evicted, as a share of the prompt's; the papers' compression ratio."),
    "prompt length": Term("Tokens in the cache before eviction.", "N"),
    "score": Term("A number for each entry; the lowest are evicted.", "s"),
    "rank and cutoff": Term(
        "The place of an entry in the order of scores of its head, 1 being the best; the entries up to the cutoff stay."
    ),
    "sink": Term(
        "One of the first tokens. Heads pay them much attention whatever the text says, so most policies keep them."
    ),
    "recent": Term("The last tokens of the prompt, which many policies keep whatever their score."),
    "window": Term(
        "The last queries of the prompt, whose attention serves as the score: 32 in the papers' protocol.", "w"
    ),
    "pooling": Term("Smoothing a score along the text, so that neighbours stay together."),
    "allocation": Term(
        "How the budget is spread over layers and heads: evenly, more for the lower layers (PyramidKV), or where the heads of a "
        "layer compete (Ada-KV)."
    ),
    "safeguard": Term("Share of the even budget that each head is sure of when heads compete (Ada-KV).", "α"),
    "slope": Term("How steeply the budgets fall from layer to layer in PyramidKV.", "β"),
    "needle": Term("A sentence hidden in a long text which nothing else in it depends on. The question asks for it."),
    "asked after eviction": Term(
        "The question comes when the cache has been cut already, so that eviction cannot know it. Seen by eviction: it comes "
        "before."
    ),
    "prefill": Term("Reading the prompt, once for all policies."),
    "decode": Term("Writing the answer, token by token."),
    "lockstep": Term("All policies write as the rows of one batch, each from its own cache, one token each at a time."),
    "output of a head": Term("The sum of all values weighted by attention. f̂ is an estimate of it.", "f, f̂"),
    "output of the kept": Term("What the head would put out from the kept entries alone.", "f_R"),
    "output of the evicted": Term(
        "What it would put out from the evicted entries alone. f̂_E is an estimate of it.", "f_E, f̂_E"
    ),
    "attention lost": Term("Share of the attention that falls on evicted entries.", "w_E"),
    "gap": Term("Distance from f_R to f_E in lengths of f: how unlike the two parts are.", "γ"),
    "angle": Term(
        "Between f_R and f_E: 0° if the evicted part says the same as the kept part, 90° if it has nothing to do "
        "with it.",
        "∠, cos",
    ),
    "relative error": Term("How far f_R is from f, in lengths of f. It is the product of w_E and γ.", "w_E γ"),
    "error after correction": Term("How far the corrected output f̂ is from f, in lengths of f.", "‖f − f̂‖ / ‖f‖"),
    "partition function": Term(
        "The sum behind the shares of attention; Z_R over the kept, Z_E over the evicted entries. Logs are natural, in nats. "
        "Ẑ_E is an estimate.",
        "Z_R, Z_E, Ẑ_E, log Z_E, log Ẑ_E",
    ),
    "moments": Term(
        "Statistics of everything evicted from a head: how many, mean key and value, and how they vary together. MomentKV keeps "
        "them."
    ),
    "correction": Term(
        "Putting an estimate of the evicted part back into the output. Order 0 uses the mean value, order 1 also how values vary "
        "with keys."
    ),
    "partition correction": Term(
        "How much of the evicted keys' variance enters the estimate of log Z_E: 0 is the paper's lower bound, 1 is exact for "
        "Gaussian keys.",
        "p",
    ),
    "residual": Term(
        "What of a value the moments cannot predict. MomentKV keeps entries that are attended to and have a large one.",
        "r, ‖r‖",
    ),
    "value norm": Term("Length of a value: how loudly an entry speaks.", "‖v‖"),
    "expected attention": Term(
        "Attention that the queries to come are expected to pay, plus a small constant ε.", "E[α], ε"
    ),
    "attention scaling": Term(
        "The model's own factor before the softmax, mostly one over the root of the head size.", "c"
    ),
    "head size": Term("Numbers in a key or value of one head.", "d"),
    "tau": Term("CapKV's weight of the expected queries: at 0 only variety counts. The paper's value is 5.", "τ"),
    "weight": Term("In CapKV, how well a key points to where the queries are expected.", "w"),
    "leverage": Term(
        "How little the other entries say the same as this one; large for what is one of its kind.", "u, uᵀ A⁻¹ u, A"
    ),
    "capacity": Term("How much can pass from queries to outputs through the kept entries, in nats.", "log det"),
    "K capacity": Term("How many query directions the kept keys can tell apart.", "K, log det(I + KKᵀ)"),
    "U capacity": Term("How many output directions the kept values can write.", "U, log det(I + UUᵀ)"),
    "KU capacity": Term("How much of the channel from query to output is left.", "KU, S, log det(I + SSᵀ), S = UKᵀ"),
    "KL divergence": Term(
        "How far a policy's expectations for the next word are from the full cache's, both having read the same words. 0: the "
        "same.",
        "KL",
    ),
    "nat": Term(
        "Unit of KL, capacities and log Z: information counted with the natural logarithm. 1 nat is 1.44 bits."
    ),
    "first difference": Term("The first token of an answer that is not the full cache's."),
    "Spearman's rho": Term("Whether two lists have the same order: 1 the same, −1 the reverse, 0 neither.", "ρ"),
    "PCA plane": Term(
        "The two directions in which a head's values vary most. The plane is fitted on all of them, so that it stays when the "
        "budget moves.",
        "PC",
    ),
    "probe queries": Term(
        "Queries of the question and of the full cache's own answer, over which errors are averaged."
    ),
    "oracle": Term(
        "Keeps what the full cache's answer really attends to: the ceiling, which no method can know beforehand."
    ),
    "RoPE": Term("How a model writes a token's position into its queries and keys, by rotating them."),
    "sliding window": Term("A layer that only ever sees the last tokens. It is never evicted."),
    "4-bit storage": Term("Keeping the entries in 4 bits a number (HQQ) instead of the model's precision."),
    "temperature": Term("0 always takes the likeliest token; above it, tokens are drawn by their chance."),
    "MiB": Term("2²⁰ bytes; a KiB is 1,024 bytes, a GiB 1,024 MiB."),
}


def find(wanted: str) -> dict[str, Term]:
    """Terms whose name, symbol or text holds `wanted`, names first; all of them for nothing."""
    wanted = wanted.strip().lower()
    by_name = {name: term for name, term in TERMS.items() if wanted in f"{name} {term.symbol}".lower()}
    by_text = {name: term for name, term in TERMS.items() if wanted in term.text.lower()}
    return by_name | by_text
