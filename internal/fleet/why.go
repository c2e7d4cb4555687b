package fleet

import (
	"strings"

	"sluice/internal/outcome"
)

// An Explanation says what a reason code means, and what is to be done.
type Explanation struct{ Means, Do string }

// Codes are what the reason of a row can begin with, beside the words of outcomes.
const (
	CodeSpread    = "spread"
	CodeAsked     = "asked"
	CodeRetry     = "retry"
	CodeRolling   = "rolling"
	CodeStuck     = "stuck"
	CodeHeld      = "held"
	CodeSilent    = "silent"
	CodeBehind    = "behind"
	CodeAhead     = "ahead"
	CodeNoPointer = "no-pointer"
	CodeCurrent   = "current"
	CodeBadBeat   = "bad-heartbeat"
	CodeVerify    = "verify"
)

// explanations has one for every code.
var explanations = map[string]Explanation{
	CodeCurrent:   {"it runs what its channel names", "nothing"},
	CodeSpread:    {"it waits its part of the promote's spread", "nothing: it rolls by itself"},
	CodeAsked:     {"it has what it needs, and root is at work", "nothing; if it stays so, look at journalctl -u 'sluice-*' on the box"},
	CodeRetry:     {"something could not be had, and is tried again by itself", "look at what it waits for"},
	CodeRolling:   {"it is in the middle of a roll", "nothing: it ends by itself"},
	CodeStuck:     {"a roll is open, and recovery has failed", "run `sluice box` there, mend what its log names, and recover"},
	CodeHeld:      {"its owner wants nothing new", "`sluice resume` on the box, when he likes"},
	CodeSilent:    {"it has published nothing for a quarter of an hour", "see whether it is on, and reaches the store"},
	CodeBehind:    {"it has not taken the promote up in time", "look at journalctl -u 'sluice-*' on the box"},
	CodeAhead:     {"it has seen a newer promote than the store shows", "find out whether the store was put back to an earlier state; promote again"},
	CodeNoPointer: {"nothing is promoted on its channel", "promote something, or have it follow another channel"},
	CodeBadBeat:   {"its heartbeat can't be read", "update its sluice; or find out who wrote it"},
	CodeVerify:    {"verify, in its sandbox, found fault with what was downloaded", "look at the bundle in the store; it is tried again by itself"},

	// States, should a reason be without a code.
	string(Waiting):        {"it waits", "look at what it says"},
	string(Refused):        {"it refused the promote", "look at what it says"},
	string(RolledBack):     {"it tried the promote, and put back what it had", "look at what it says"},
	string(RollbackFailed): {"it tried the promote, and what it had does not pass its gate either", "look at the service on the box"},
	string(Unreadable):     {"what it says, or its pointer, can't be read", "look at what it says"},

	string(outcome.StaleHint):      {"the store and the hint speak of different promotes", "nothing; if it stays so, a replica of the store lags"},
	string(outcome.BadHint):        {"what verify hands to root is no hint", "find out who writes to /data/sluice on the box"},
	string(outcome.BadSignature):   {"no key that the box trusts signed it", "find out who wrote to the store, and which trust document the box has"},
	string(outcome.WrongChannel):   {"it is signed for another channel", "find out who wrote to the store"},
	string(outcome.WrongComponent): {"it is signed for another component", "find out who wrote to the store"},
	string(outcome.Replay):         {"it is older than what the box has verified", "find out who put the store back; promote again"},
	string(outcome.Expired):        {"nobody has refreshed it in time", "sluice refresh, or sluice trust"},
	string(outcome.UpgradeNeeded):  {"it is of a version that its reader is too old for", "update component sluice first"},
	string(outcome.NoArtifact):     {"the release has nothing for its platform", "release it for that platform too"},
	string(outcome.DigestMismatch): {"the bytes are not the ones that were signed", "find out who changed them; it is tried again by itself"},
	string(outcome.BadBundle):      {"the signed bundle breaks its own rules", "release a new version"},
	string(outcome.VersionLie):     {"its version command fails, or says another version", "release a new version"},
	string(outcome.ForeignFile):    {"something that is not Sluice's stands where a file would go", "move it away on the box, then change the component's .conf there; or SLUICE_ADOPT"},
	string(outcome.Needs):          {"another component must be at a version first", "promote that one"},
	string(outcome.Mutated):        {"a version came back with other bytes", "release a new version; never reuse one"},
	string(outcome.BadGoodSet):     {"the build it would go back to is damaged", "roll back to that build first, so that it is fetched again"},
	string(outcome.NoSpace):        {"the disk is too full", "make room on the box"},
	string(outcome.IO):             {"the disk failed", "look at the box's disk"},
	string(outcome.Store):          {"the store could not be read", "see whether the box reaches the store, and may read it"},
	string(outcome.Converge):       {"a step that changes the box failed", "the reason names it"},
	string(outcome.Gate):           {"the new build did not come up", "its last words are in the reason; release a new version"},
	string(outcome.Soak):           {"it came up, and did not stay up", "its last words are in the reason; release a new version"},
	string(outcome.Arm):            {"it runs, and something of it could not be enabled or started", "look at that unit on the box"},
	string(outcome.Late):           {"it has not ended in time", "look at sluice status"},
	string(outcome.Configuration):  {"the box's own configuration is wrong", "mend what the reason names, in /etc/sluice there"},
	string(outcome.Interrupted):    {"the roll was cut by a power loss or a kill", "nothing: it is tried again, three times"},
}

// Code is the stable word that a row's reason begins with.
func (r Row) Code() string {
	if !r.known() {
		return string(r.State) // which is a code where there is no reason
	}
	word, _, _ := strings.Cut(r.Reason, ":")
	return word
}

// known reports whether the reason begins with a code.
func (r Row) known() bool {
	word, _, _ := strings.Cut(r.Reason, ":")
	_, known := explanations[word]
	return known
}

// Why explains a row.
func (r Row) Why() Explanation { return explanations[r.Code()] }
