// A cache rule as an engine has it, behind five C functions: the expert that has been used least often leaves, of equals
// the one of the lowest id, then of the lowest layer. docs/native_rules.md builds it and calls it from a policy.
#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

#ifdef _WIN32
#define RULE extern "C" __declspec(dllexport)
#else
#define RULE extern "C"
#endif

struct Rule {
    int32_t n_experts;          // of a layer
    std::vector<int64_t> uses;  // by layer * n_experts + expert
    std::vector<uint8_t> held;
};

RULE void *rule_new(int32_t n_layers, int32_t n_experts) {
    const auto n = static_cast<std::size_t>(n_layers) * n_experts;
    return new Rule{n_experts, std::vector<int64_t>(n), std::vector<uint8_t>(n)};
}

RULE void rule_free(Rule *rule) { delete rule; }

// A gate has asked for the expert; from now on it has its slot.
RULE void rule_accessed(Rule *rule, int32_t index) {
    rule->uses[index] += 1;
    rule->held[index] = 1;
}

RULE void rule_evicted(Rule *rule, int32_t index) { rule->held[index] = 0; }

static std::pair<int64_t, int32_t> key(const Rule *rule, int32_t index) {
    return {rule->uses[index], index % rule->n_experts};
}

// Who leaves: one that is held and not pinned by the running layer; -1 where there is none.
RULE int32_t rule_victim(const Rule *rule, const uint8_t *pinned) {
    int32_t best = -1;
    for (int32_t i = 0; i < static_cast<int32_t>(rule->uses.size()); ++i)
        if (rule->held[i] && !pinned[i] && (best < 0 || key(rule, i) < key(rule, best))) best = i;
    return best;
}
