"""Abstract of the report."""

from __future__ import annotations

from kintsugi.lab.campaign.records import METHODS, CampaignFile
from kintsugi.lab.campaign.records import OURS as OUR_METHOD
from kintsugi.lab.report import campaign as campaigns
from kintsugi.lab.report import contrast, measures
from kintsugi.lab.report.document import MISSING, Block, Bullets, Paragraph, listed
from kintsugi.lab.report.measures import Share, seconds
from kintsugi.lab.report.results import Results
from kintsugi.lab.report.tables import FRAGILE, OURS, label


def abstract_of(results: Results) -> tuple[Block, ...]:
    items = []
    fragile, ours = results.of(FRAGILE), results.of(OURS)
    if fragile:
        misled = sum(not run.correct for run in fragile)
        items.append(
            f"Faults were injected into a conventional (fragile) RL system in {len(fragile)} "
            f"scenario{'s' * (len(fragile) != 1)}. The last error in its controller's log pointed to a wrong cause in "
            f"**{misled} of {len(fragile)}**."
        )
    if ours:
        right = [run for run in ours if run.correct]
        times = [run.diagnosed_after_s for run in right if run.diagnosed_after_s is not None]
        slowest = f", at the latest {seconds(max(times))} after the first effect" if times else ""
        items.append(
            f"On Kintsugi{_with_what(results)} the true cause was named in "
            f"**{len(right)} of {len(ours)}**{slowest}; {sum(run.recovered for run in ours)} of {len(ours)} "
            f"runs completed, and {sum(run.steps_lost for run in ours)} committed steps were lost."
        )
    if results.campaign is not None and campaigns.faulty(results.campaign):
        items.append(_campaign_sentence(results.campaign))
    amplified = [
        f"{label(run)} {contrast.times(factor)}"
        for run, other in contrast.pairs(results.valid)
        if run.profile == FRAGILE and (factor := contrast.amplification(run, other)) is not None
    ]
    if amplified:
        items.append(
            f"Amplification of the same fault by RL against SFT, both on the fragile system: {', '.join(amplified)} "
            f"({contrast.HOW})."
        )
    return (Bullets(tuple(items)),) if items else (Paragraph("No experiment came to a result."),)


def _with_what(results: Results) -> str:
    """Describe how the faults of the two systems compare, where both were tested."""
    fragile = {run.scenario: run for run in results.of(FRAGILE)}
    other = [
        run.scenario
        for run in results.of(OURS)
        if run.scenario in fragile and not measures.same_faults(run, fragile[run.scenario])
    ]
    if not fragile:
        return ""
    return f", with the same faults{f' except in {listed(other)}' if other else ''},"


def _campaign_sentence(campaign: CampaignFile) -> str:
    others = " and ".join(
        f"{_percent(campaigns.top1(campaign, method))} for the {METHODS[method]}"
        for method in campaigns.methods_of(campaign)
        if method != OUR_METHOD
    )
    silent = campaigns.abstained(campaign, OUR_METHOD)
    at_rest = f"; it said nothing in {_percent(silent)} of {silent.whole} cases in which nothing was wrong"
    right = campaigns.top1(campaign, OUR_METHOD)
    return (
        f"In a blind campaign of {len(campaign.cases)} random cases, the first answer was right in "
        f"**{_percent(right)}** of {right.whole} "
        f"faults{', against ' + others if others else ''}{at_rest if silent.whole else ''}."
    )


def _percent(counted: Share) -> str:
    return MISSING if counted.value is None else f"{counted.value:.0%}"
