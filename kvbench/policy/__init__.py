"""The contract between the methods, which decide, and the store, which executes.

A method is a `Policy`, a dataclass whose fields are its settings. It declares, with attributes that it assigns in
`__post_init__` or in its class body, which precision tiers it uses (`tiers`), what it ranks tokens by (`score`), how
much of the cache it must see at once (`scope`), and a few things more; all have defaults. It answers two questions with
tensors: which tier does each prompt token go to (`plan_prefill`), and where does the next token go, who makes room for
it and what becomes of the one who does (`plan_decode`). A third, optional answer evicts in bulk (`plan_compact`). A
policy never sees keys or values, never counts bytes, never knows a backend. What it ranks by is a `Statistic`: one of
those here, or a small class in the method's own file, which the store runs on a layer's tensors.

Methods of one precision derive from `ByLayer`, with which a user may give some layers or heads another one; the store
knows then what tier 0 stands for in each list. Methods that rank tokens derive from `Ranked`, which has the settings
that compose (who shares the budget, chunks, norms of values) and the plan of a prompt. `Scored` adds evictions of every
list while decoding, what is protected, and thresholds; `WindowRanked` ranks a prompt by its last queries.

How the methods of the field map onto it (tiers; statistics; scope; prompt; decode):

- full, int8, int4, fp8, and formats of engines (fp8_per_token_head, int8_per_token_head, turboquant_k8v4,
  turboquant_4bit, turboquant_3bit, nvfp4): one tier; none; head; all tokens to tier 0; append.
- streaming_llm: k16v16; none; head; sinks and recent; overwrite the oldest non-sink, `cache_relative` positions.
- h2o: k16v16; all queries, sum, decode update; head; heavy and recent; overwrite `view.argmin(by="score")`.
- snapkv: any token tier; last w, max-pool 7, group mean; head; top C - w and the window; append.
- pyramidkv, ada_snapkv: snapkv with `allocation`; `ada` has scope layer, `global` scope model.
- kivi: channel keys; none; head; all; `Residual` (oldest value, all keys), flushed after attention.
- kvquant_style: as kivi, but keys per channel before the rotary embedding (`pre_rope`); `Residual` of one group.
- kvquant: codes of calibrated tables (`CodeBooks`), and k16v16 for the first tokens; none; head; all; append.
- minikv: channel keys; all queries, sum; head or model; heavy and recent; `Residual` (all), before attention.
- kv_compress: k16v16; last 8 or all but near, squared, pooled; model; blocks ranked over all layers and heads;
  `plan_compact` before every step that begins over the budget.
- diffkv: k8v4 and k4v2; all queries, group max, decode update; head; thresholds alpha / N; `DecodePlan` with demotion.
- scissorhands: k16v16; last w, counts below 1 / n, decode update; head; the least often low; `plan_compact` when full.
- tova: k16v16; the last query, mean, replaced in decode; layer; the heaviest; overwrite `view.argmin(over_layer=True)`.
- kvzip: any tier; what a second pass over the prompt (`Probe`) attends to; model; the best of all heads; append.
- knorm: any tier; key norms, no query; head; the smallest norms; append.
- keydiff, lagkv: any tier; keys, or keys and values, of all slots again at each eviction; head; the best; append.
- expected_attention: any tier; all queries before the rotary embedding, later a ring; head; the best; append.
- r_kv: any tier; last 8 queries and a ring, and how keys repeat each other; head; the best; `plan_compact`.
- vatp: any tier; all queries, sum, times norms of values (`also`: without them); head; sinks, heavy, recent.
- chunkkv: as snapkv, summed over heads and chunks; head, or model where layers share a choice.
- critical: as snapkv or ada_snapkv, and norms of projected values (`also`); head or layer; two stages.
- quest: any token tier; none; head; all; append, and a `ReadSpec`: steps read the pages with the largest bounds.
- cake: any tier; last w, mean and variance, entropy beside them (`also`); model, by `layer_weights`; append.
- headkv: as snapkv with `allocation=table`.
- simlayerkv: any tier; last w, mean; layer; all tokens or sinks and recent; as streaming_llm in lazy layers.
- keyformer: as h2o, by attention with noise and a temperature (`of_step`).
- q_hitter: any tier; all queries, sum, mixed with the error of quantisation (`also`: without it); head; the best.
- fastgen: any tier; all queries, far ones apart (`also`); head; the smallest of four sets that suffices; append.
- pyramid_infer: any tier; a share of the queries; model; in each layer some of what the one below kept; append.
- zipcache: k16v16, k4v4 and k2v2; some queries as probes, decode update; head; all; `DecodePlan` with demotion.
- qaq: k4v4, k4v2, k2v4 and k2v2; last w, largest, as bits (`also`: of values); head; all, a tier each; append.
- triattention: as random_trace, by keys and a table of mean queries; `plan_compact`.
- dms: any tier; last w, group max, decode update; head; a threshold; `view.find` what leaves the window.
- random: any tier; none; head; a seeded choice; append. random_trace: with `protect=prompt`, by `plan_compact`.
- duo_attention: any tier; none; head; all tokens or sinks and recent, by a table; as streaming_llm for some heads.
"""

from kvbench.errors import NotForModel
from kvbench.policy.allocation import Allocation, read_table, shares_by_score, shares_by_table
from kvbench.policy.base import Policy
from kvbench.policy.budget import Budget
from kvbench.policy.by_layer import ByLayer
from kvbench.policy.chunked import CHUNK, check_chunk, check_chunk_place
from kvbench.policy.declare import ALL_QUERIES, CodeBooks, Probe, ReadSpec, Residual, ScoreSpec, TierTable
from kvbench.policy.heavy import HeavyHitters
from kvbench.policy.plans import APPEND, EVICT, CompactPlan, DecodePlan, Extreme, PrefillPlan, SlotArrays
from kvbench.policy.ranked import Ranked
from kvbench.policy.ranking import (
    keep_blocks,
    largest_remainder,
    num_blocks,
    pyramid_budgets,
    rank_descending,
    share_with_cap,
)
from kvbench.policy.scored import Scored, shrink_to_share
from kvbench.policy.settings import BudgetText, TierText, check_sizes
from kvbench.policy.statistics import (
    AttentionCall,
    BelowUniform,
    KeyNorms,
    LayerTensors,
    Need,
    Probability,
    Replay,
    Statistic,
    WithValueNorms,
)
from kvbench.policy.stepwise import Stepwise
from kvbench.policy.tiers import ALLOWED_BITS, Tier
from kvbench.policy.views import GONE, DecodeView, PrefillView
from kvbench.policy.window import WindowRanked
from kvbench.rules import MAX_TOKENS, TABLE_OR_PATH, Choice, Number, Several, Text, Whole

__all__ = [
    "ALLOWED_BITS",
    "ALL_QUERIES",
    "APPEND",
    "Allocation",
    "AttentionCall",
    "EVICT",
    "MAX_TOKENS",
    "BelowUniform",
    "Budget",
    "BudgetText",
    "CHUNK",
    "ByLayer",
    "Choice",
    "CodeBooks",
    "CompactPlan",
    "DecodePlan",
    "DecodeView",
    "Extreme",
    "GONE",
    "HeavyHitters",
    "KeyNorms",
    "LayerTensors",
    "Need",
    "NotForModel",
    "Number",
    "Policy",
    "PrefillPlan",
    "PrefillView",
    "Probability",
    "Probe",
    "Ranked",
    "ReadSpec",
    "Replay",
    "Residual",
    "ScoreSpec",
    "Scored",
    "Several",
    "SlotArrays",
    "Statistic",
    "Stepwise",
    "TABLE_OR_PATH",
    "Text",
    "Tier",
    "TierTable",
    "TierText",
    "Whole",
    "WindowRanked",
    "WithValueNorms",
    "check_chunk",
    "check_chunk_place",
    "check_sizes",
    "keep_blocks",
    "largest_remainder",
    "num_blocks",
    "pyramid_budgets",
    "rank_descending",
    "read_table",
    "share_with_cap",
    "shares_by_score",
    "shares_by_table",
    "shrink_to_share",
]
