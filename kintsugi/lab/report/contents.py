"""Text of the report: motivation, set-up, results, analysis, discussion.

Every number comes from the results. A sentence that needs a value that was not measured is left out, and missing
results are listed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kintsugi.lab.campaign.log_readers import LAST_ERROR
from kintsugi.lab.campaign.records import METHODS
from kintsugi.lab.campaign.records import OURS as OUR_METHOD
from kintsugi.lab.fragile.timeouts import HOUR_S, STOP_JOB_S, Scale
from kintsugi.lab.report import campaign as campaigns
from kintsugi.lab.report import figures, measures, tables
from kintsugi.lab.report.abstract import abstract_of
from kintsugi.lab.report.contrast import contrast_table, coupling_points_table
from kintsugi.lab.report.document import Block, Bullets, Document, Paragraph, ReportFigure, Section, listed
from kintsugi.lab.report.expectations import CHALLENGES, SCENARIOS, scenario_of, title_of
from kintsugi.lab.report.measures import seconds
from kintsugi.lab.report.plotting import RenderedFigure
from kintsugi.lab.report.propagation import propagation
from kintsugi.lab.report.results import Results
from kintsugi.lab.report.tables import FRAGILE, OURS, SFT
from kintsugi.lab.scenarios.records import RunRecord

TITLE = "Faults in distributed RL training: location, symptoms and time to diagnosis"


def document_of(results: Results) -> tuple[Document, list[RenderedFigure]]:
    """Build the report and its figures."""
    drawn: list[RenderedFigure] = []

    def picture(figure: RenderedFigure, caption: str, alternative: str) -> ReportFigure:
        drawn.append(figure)
        return ReportFigure(
            name=figure.name, caption=caption, alternative=alternative, svg=figure.inline(alternative)
        )

    sections = [
        Section("1 Motivation: three challenges", _motivation(results)),
        Section("2 Experimental set-up", _setup(results)),
        *_scenarios(results, picture),
        Section("4 Quantitative analysis", _analysis(results, picture)),
        Section("5 Discussion", _discussion(results)),
        Section("6 What is missing", _missing(results)),
        Section("7 Raw data", _raw()),
    ]
    document = Document(
        title=TITLE, subtitle=_subtitle(results), abstract=abstract_of(results), sections=tuple(sections)
    )
    return document, drawn


Place = Callable[[RenderedFigure, str, str], ReportFigure]


def _subtitle(results: Results) -> str:
    source = results.runs or results.campaign
    assert source is not None
    units = {"memory_gib": "GiB of memory", "processors": "CPUs"}
    facts = [
        f"{value} {units[name]}" if name in units else f"{name} {value}"
        for name, value in source.host.items()
    ]
    return " · ".join([source.date.replace("T", " ").replace("+00:00", " UTC"), ", ".join(facts)])


# 1 Motivation.


def _motivation(results: Results) -> tuple[Block, ...]:
    blocks: list[Block] = [
        Paragraph(
            "Reinforcement learning of language models is a loop of stages (rollout, train, weight update) "
            "that run in different processes and wait for each other. Three properties make its faults hard to "
            "find. Each is shown here by experiments with injected, and therefore known, faults."
        )
    ]
    for challenge, meaning in CHALLENGES.items():
        names = [name for name, scenario in SCENARIOS.items() if challenge in scenario.proves]
        blocks.append(
            Paragraph(
                f"**Challenge {challenge}. {meaning}.** Shown by "
                f"{listed(names)}.{_evidence(results, challenge)}"
            )
        )
    if results.of(FRAGILE) or results.of(OURS):
        blocks.append(tables.challenges_table(results.valid, scale=results.scale))
    return tuple(blocks)


def _evidence(results: Results, challenge: str) -> str:
    """Return one sentence with the measurement; empty where there is none."""
    runs = [
        run
        for run in results.of(FRAGILE)
        if challenge
        in (SCENARIOS[name].proves if (name := scenario_of(run)) in SCENARIOS else run.challenges)
    ]
    seen = [run for run in runs if run.surfaced is not None and run.injected]
    if not runs:
        return " Not measured: the fragile system was not run."
    if not seen:
        return f" Measured: none of {len(runs)} runs of the fragile system shows an error."
    if challenge == "A":
        away = [run for run in seen if measures.stage_of(_target(run)) != measures.stage_of(_surface(run))]
        return f" Measured: in {len(away)} of {len(seen)} the error shows in another part than the fault."
    if challenge == "B":
        delays = [delay for run in seen if (delay := measures.masking_s(run)) is not None]
        longest = f", {seconds(max(delays))} after the first effect (time-outs scaled)" if delays else ""
        wrong = sum(not measures.says_right(run, run.readings.get(LAST_ERROR)) for run in seen)
        return f" Measured: the last error blames the wrong cause in {wrong} of {len(seen)}{longest}."
    contrasts = {scenario_of(run) for run in results.of(SFT)}
    both = sum(scenario_of(run) in contrasts for run in seen)
    tried = f"{both} of them were also tried on SFT"
    return f" Measured: {len(seen)} of these couplings broke the fragile system; {tried}."


def _target(run: RunRecord) -> str:
    fault = measures.target_fault_of(run)
    assert fault is not None
    return fault.target


def _surface(run: RunRecord) -> str:
    assert run.surfaced is not None
    return run.surfaced.process


# 2 Set-up.


def _setup(results: Results) -> tuple[Block, ...]:
    if results.runs is None:
        return (Paragraph("No scenario was run; see the campaign in section 4."),)
    workloads = sorted({run.workload for run in results.runs.runs})
    blocks: list[Block] = [
        Paragraph(
            f"Two systems run the same workload ({listed([f'`{name}`' for name in workloads])}) as real "
            "processes with real sockets and files: Kintsugi, and a conventional, fragile system (one "
            "controller, remote calls over HTTP, long time-outs, clean-up after any error, weights through a "
            "meta-server or the disk, devices handed over by notification). Faults of the same kinds and strengths "
            "are injected into both, into the component with the same task, as listed in the table below."
        ),
        Paragraph(
            "Each run begins with steps without a fault, which give the mean ± 2σ of every metric. "
            "Then the fault is injected at its trigger and undone after its duration. Where there are several, times "
            "are counted from the one that has to be diagnosed. The first effect is the first metric outside that "
            "band, overdue step, or logged error. On both systems the same program samples processes, hosts and "
            "links once a second. The diagnosis runs in a process that gets the run folder and nothing else; it "
            "sees no marker of the injection."
        ),
    ]
    scaled = Scale.by(results.scale)
    if scaled.factor > 1:
        blocks.append(
            Paragraph(
                "**Time scale.** The fragile system's time-outs are scaled down: an hour "
                f"takes {seconds(scaled.of(HOUR_S))}, half a minute {seconds(scaled.of(STOP_JOB_S))}. `a → "
                "b` is a measured time, and the same time with one unscaled time-out."
            )
        )
    blocks.append(tables.injections_table(results.valid))
    baseline = tables.baseline_table(results.valid)
    return (*blocks, baseline) if baseline is not None else tuple(blocks)


# 3 Results.


def _scenarios(results: Results, picture: Place) -> list[Section]:
    names = list(dict.fromkeys(scenario_of(run) for run in results.valid))
    if not names:
        return [Section("3 Results", (Paragraph("No scenario came to a result."),))]
    sections = [Section("3 Results of the scenarios", (tables.outcome_table(results.valid),))]
    for name in names:
        runs = [run for run in results.valid if scenario_of(run) == name]
        sections.append(Section(title_of(name), _scenario(name, runs, results.scale, picture), level=3))
    return sections


def _scenario(name: str, runs: Sequence[RunRecord], scale: float, picture: Place) -> tuple[Block, ...]:
    blocks: list[Block] = []
    scenario = SCENARIOS.get(name)
    if scenario is not None:
        blocks.append(
            Paragraph(
                f"Evidence for {listed([f'challenge {each}' for each in scenario.proves])}. "
                f"Expected propagation: {scenario.path}. Coupling point: "
                f"{scenario.coupling[0].lower()}{scenario.coupling[1:]}; in SFT {scenario.absent_in_sft}."
            )
        )
    blocks += [Paragraph(_description(run, scale=scale)) for run in runs]
    shown = [run for run in runs if run.injected and run.profile != SFT] or list(runs)
    blocks.append(
        picture(
            propagation(shown, name=f"propagation_{name}"),
            f"{name}: propagation of the fault. Bar: duration of the fault. Numbers: affected processes in order. "
            "Cross: the visible error. Dashed line: time of the verdict (blue: right, orange: wrong). Events of one "
            "process at almost the same time share a mark.",
            f"Time by component for {name}, one panel per system; the paragraphs above say the same.",
        )
    )
    measured = [run for run in shown if figures.has_series(run)]
    if measured:
        blocks.append(
            picture(
                figures.anomalies(measured, name=f"anomaly_{name}"),
                f"{name}: the first metric of this fault type that left its fault-free band, and the part of a step "
                "that was delayed most, with the times of injection, error and verdict.",
                f"Series over time for {name}, with the injection, the error and the verdict marked.",
            )
        )
    return tuple(blocks)


def _description(run: RunRecord, *, scale: float) -> str:
    """Describe one run in a few sentences."""
    system = {FRAGILE: "Fragile", OURS: "Kintsugi", SFT: "SFT"}.get(run.profile, run.profile)
    done = listed([f"{tables.kind_name(fault.kind)} at `{fault.target}`" for fault in run.injected])
    parts = [f"**{system}.** Injected: {done}."]
    if run.surfaced is not None:
        after = measures.with_unscaled(measures.error_delay_s(run), run, scale=scale)
        message = measures.message_of(run.surfaced.message)[:160]
        parts.append(f"The error shows in `{run.surfaced.process}` {after} after the injection: `{message}`.")
    else:
        parts.append("No error is shown.")
    said = run.diagnosed
    verdict = "right" if run.correct else "wrong"
    if run.profile != OURS:
        parts.append(
            f"Taken literally, it blames `{said.process}` ({tables.kind_name(said.kind)}): {verdict}."
            if said
            else ""
        )
    elif said is not None:
        after = seconds(measures.diagnosis_s(run))
        parts.append(
            f"The diagnosis names `{said.process}` ({tables.kind_name(said.kind)}, confidence "
            f"{said.confidence:.2f}) after {after}: {verdict}."
        )
    else:
        parts.append("The diagnosis names nothing: wrong.")
    ended = "completed" if run.recovered else "did not complete"
    lost = f"{run.steps_lost} committed step{'' if run.steps_lost == 1 else 's'}"
    parts.append(f"The run {ended}, {lost} lost.")
    return " ".join(filter(None, parts))


# 4 Analysis.


def _analysis(results: Results, picture: Place) -> tuple[Block, ...]:
    blocks: list[Block] = []
    runs, campaign = results.valid, results.campaign
    if runs:
        blocks += [tables.coupling_table(runs), tables.diagnosis_table(runs, scale=results.scale)]
        assert results.runs is not None
        blocks.append(tables.expectations_table(results.runs))
    timed = [run for run in runs if run.profile != SFT and measures.diagnosis_s(run) is not None]
    curves = campaigns.curves(campaign) if campaign is not None else []
    if timed or curves:
        blocks.append(
            picture(
                figures.diagnosis_times(timed, curves, scale=results.scale, name="diagnosis_times"),
                _times_caption(timed, curves),
                "Time to diagnose with fine-grained monitoring against reading logs.",
            )
        )
    if results.attempts:
        blocks.append(tables.participants_table(results.attempts))
    if campaign is not None and campaign.cases:
        blocks += [campaigns.methods_table(campaign), campaigns.kinds_table(campaign)]
        quiet = campaigns.quiet_table(campaign)
        blocks += [quiet] if quiet is not None else []
        mistakes = campaigns.mistakes_table(campaign)
        blocks += (
            [mistakes]
            if mistakes is not None
            else [Paragraph("The diagnosis made no mistake in this campaign.")]
        )
    if runs:
        contrast = contrast_table(runs, scale=results.scale)
        blocks += [contrast] if contrast is not None else []
        blocks.append(coupling_points_table(runs))
    return tuple(blocks)


def _times_caption(timed: Sequence[RunRecord], curves: Sequence[campaigns.AccuracyCurve]) -> str:
    parts = ["Time to diagnose, with and without fine-grained monitoring."]
    if timed:
        parts.append(
            "Scenarios: from the injection to the last error in the fragile system's log, at which reading "
            "can begin, and to the verdict of the diagnosis; hollow marks name the wrong cause."
        )
    if curves:
        parts.append(
            "Campaign: the share of faults with a right first answer, by seconds since the fault began."
        )
    return " ".join(parts)


# 5 Discussion.


def _discussion(results: Results) -> tuple[Block, ...]:
    blocks: list[Block] = [Paragraph("**Why is reading logs not enough?** " + _why_not_logs(results))]
    blocks.append(Paragraph("**Why is fine-grained monitoring needed?** " + _why_metrics(results)))
    blocks.append(
        Paragraph(
            "**What limits these results.** The runs are small and on one host: counts of files and lines "
            "grow with the number of workers, times do not shrink with it. The fragile system was "
            "built for this comparison; it fails by its design and not by script, but it is one design. "
            + _on_participants(results)
        )
    )
    return tuple(blocks)


def _on_participants(results: Results) -> str:
    if results.attempts:
        participants = len({each.person for each in results.attempts})
        return f"{participants} engineers were timed; they knew the list of fault kinds."
    return (
        "No human study was done: log reading is represented by two rules, interpreted generously, and by the "
        "time at which reading could begin. `kintsugi lab kit` writes the material for a human study."
    )


def _why_not_logs(results: Results) -> str:
    fragile = [run for run in results.of(FRAGILE) if run.surfaced is not None and run.injected]
    sentences = []
    sentences.append(
        "A log contains what its process could observe. A process that waits for another one logs a time-out and "
        "not the reason, and the clean-up after an error writes the last line."
    )
    if fragile:
        elsewhere = sum(_target(run) != _surface(run) for run in fragile)
        sentences.append(
            f"Here the error was in the log of another process than the fault in {elsewhere} of "
            f"{len(fragile)} fragile runs."
        )
    if results.campaign is not None and campaigns.faulty(results.campaign):
        rates = [
            f"{METHODS[method]} {campaigns.misdiagnosed(results.campaign, method)}"
            for method in campaigns.methods_of(results.campaign)
            if method != OUR_METHOD
        ]
        if rates:
            sentences.append(f"Misdiagnosis rate over the campaign: {'; '.join(rates)}.")
    return " ".join(sentences)


def _why_metrics(results: Results) -> str:
    sentences = []
    sentences.append(
        "The cause of a chain of waits is the process at its end, which waits for no other process. The evidence "
        "is a metric of that process, link or disk: it has to be recorded per process, at least every second, "
        "on comparable clocks."
    )
    right = [run for run in results.of(OURS) if run.correct and run.diagnosed is not None]
    earlier = [
        run
        for run in right
        if run.surfaced is None or (run.diagnosed is not None and run.diagnosed.t < run.surfaced.t)
    ]
    if right:
        sentences.append(
            f"In {len(earlier)} of {len(right)} scenarios that the diagnosis got right, it named the cause "
            "from metrics alone, before or without any error in a log."
        )
    return " ".join(sentences)


# 6 and 7.


def _missing(results: Results) -> tuple[Block, ...]:
    items = []
    for name in SCENARIOS:
        have = {run.profile for run in results.valid if scenario_of(run) == name}
        lacking = [profile for profile in (FRAGILE, OURS, SFT) if profile not in have]
        if lacking:
            items.append(f"{name}: no result for {listed(lacking)}.")
    every = results.runs.runs if results.runs else ()
    items += [f"{tables.label(run)} is void: {run.problem}" for run in every if run.problem]
    if results.campaign is None:
        items.append("No campaign (`campaign.json`).")
    elif not campaigns.quiet(results.campaign):
        items.append("The campaign has no healthy or benign case.")
    if not results.attempts:
        items.append("No human study (`kintsugi lab kit`).")
    return (Bullets(tuple(items)),) if items else (Paragraph("Nothing: all parts have results."),)


def _raw() -> tuple[Block, ...]:
    return (
        Paragraph(
            "Next to this page: `runs.json` and `campaign.json` as they were written by the experiments; "
            "every table as `data/*.csv`, with all runs in `data/runs.csv`, all cases in `data/cases.csv` "
            "and every series and timeline in `data/series_*.csv` and `data/moments_*.csv`; every figure as "
            "`figures/*.svg` and `figures/*.png`; the same text as `report.md`."
        ),
    )
