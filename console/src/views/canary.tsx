// Canary: which version gets which conversations, what users thought of both, and what people decide about it.
import { get, post, session } from "../api";
import { armsOf, placeOf, type ArmRow, type Canary, type Trial } from "../canary/types";
import { clock, duration, plural, share, short } from "../format";
import { is, useEvents } from "../live";
import { useLoaded } from "../load";
import { Badge, type Tone } from "../parts/badge";
import { confirm } from "../parts/confirm";
import { Failure, Loading } from "../parts/notice";
import { Table } from "../parts/table";
import { href } from "../router";
import { model, recorded } from "../shell";

const load = (signal: AbortSignal) => get<Canary>("/admin/v1/canary", { model: model.value }, signal);

export function CanaryView() {
  const { value, error, again } = useLoaded(load, [model.value, session.value], recorded.value ? 0 : 2_000);
  useEvents((events) => events.some((event) => is(event, "canary", "version", "gap")) && again());
  const found = value.value;
  return (
    <>
      <h1>Canary</h1>
      <Failure text={error.value} />
      {!found && !error.value && <Loading />}
      {found && (
        <>
          {found.running ? <Running trial={found.running} done={again} /> : <p role="status">{idle(found)}</p>}
          <h2>Ended trials</h2>
          <Ended trials={found.ended} />
        </>
      )}
    </>
  );
}

function idle(found: Canary): string {
  if (!found.share) return "Versions are not tried: [update] canary sets the share of new conversations that get a version first.";
  return `No version is on trial. The next one gets ${share(found.share)} of the new conversations until ${plural(found.conversations, "rewarded conversation")} have ended.`;
}

function Running({ trial, done }: { trial: NonNullable<Canary["running"]>; done: () => void }) {
  const act = (action: string) => () => post(`/admin/v1/canary/${action}`, { model: model.value }).finally(done);
  const ask = (action: string, title: string, body: string, dangerous = false) => () => confirm({ title, body, action: title, dangerous, act: act(action) });
  return (
    <section class="panel trial" aria-labelledby="trial">
      <div class="panel-head">
        <h2 id="trial">
          Version {trial.version} is on trial against version {trial.live}
        </h2>
        <span class="buttons">
          {trial.held ? (
            <button type="button" onClick={() => void act("resume")()}>
              Resume
            </button>
          ) : (
            <button type="button" onClick={() => void act("hold")()}>
              Hold
            </button>
          )}
          <button type="button" onClick={ask("promote", "Promote", `All engines load version ${trial.version}, and training goes on from it.`)}>
            Promote
          </button>
          <button
            type="button"
            class="danger"
            onClick={ask("rollback", "Roll back", `Version ${trial.version} is bad from then on: no engine loads it again, and nothing that it sampled is trained.`, true)}
          >
            Roll back
          </button>
        </span>
      </div>
      <p role="status">
        {share(trial.share)} of the conversations since {clock(trial.began_at)}: {trial.why}.
      </p>
      <Arms trial={trial} />
      <h3>Engines</h3>
      <Table
        caption="Engines of both versions"
        rows={trial.engines}
        id={(engine) => engine.name}
        columns={[
          { head: "Engine", cell: (engine) => <strong>{engine.name}</strong> },
          { head: "Serves", cell: (engine) => <Badge tone={engine.version === trial.version ? "info" : "plain"}>{engine.version === trial.version ? "candidate" : "live"}</Badge> },
          { head: "Version", cell: (engine) => (engine.version < 0 ? "–" : engine.version), number: true },
          { head: "State", cell: (engine) => engine.state },
          { head: "Calls", cell: (engine) => engine.streams, number: true },
        ]}
      />
      <h3>Feedback</h3>
      <Table
        caption="The newest ended conversations"
        rows={trial.newest}
        id={(one) => one.episode_id}
        empty="No conversation of the trial has ended yet."
        columns={[
          { head: "Conversation", cell: (one) => <a href={href("episodes", one.episode_id)}>{one.episode_id}</a> },
          { head: "Version", cell: (one) => <Badge tone={one.arm === "candidate" ? "info" : "plain"}>{one.arm}</Badge> },
          { head: "Reward", cell: (one) => (one.reward === null ? <span class="quiet">none</span> : short(one.reward)), number: true },
          { head: "Ended", cell: (one) => clock(one.at) },
        ]}
      />
    </section>
  );
}

function Arms({ trial }: { trial: Trial }) {
  return (
    <Table
      caption="Figures of both versions"
      stacked
      rows={armsOf(trial)}
      id={(arm) => arm.name}
      columns={[
        { head: "Gets", cell: (arm) => <strong>{arm.name === "candidate" ? `${share(trial.share)}: version ${arm.version}` : `the rest: version ${arm.version}`}</strong> },
        { head: "Ended", cell: (arm) => arm.conversations, number: true },
        { head: "Rewarded", cell: (arm) => arm.rewarded, number: true },
        { head: "Reward", cell: (arm) => (arm.reward_mean === null ? "–" : short(arm.reward_mean)), number: true },
        { head: "Interval", cell: (arm) => <Interval arm={arm} trial={trial} /> },
        { head: "Malformed", cell: (arm) => share(arm.faulty_share), number: true },
        { head: "Refused", cell: (arm) => share(arm.refused_share), number: true },
        { head: "Tokens", cell: (arm) => (arm.tokens_mean === null ? "–" : short(arm.tokens_mean)), number: true },
        { head: "Per token", cell: (arm) => duration(arm.seconds_per_token), number: true },
      ]}
    />
  );
}

/** The interval of the mean reward, on the range of rewards. The candidate is returned once its interval lies left of the other one. */
function Interval({ arm, trial }: { arm: ArmRow; trial: Trial }) {
  const left = placeOf(arm.reward_low, trial);
  const width = placeOf(arm.reward_high, trial) - left;
  const words = `${short(arm.reward_low)} to ${short(arm.reward_high)}`;
  return (
    <span class="interval" title={words}>
      <svg viewBox="0 0 100 10" width="100" height="10" role="img" aria-label={words}>
        <rect class="range" x="0" y="4" width="100" height="2" />
        <rect class={arm.name} x={100 * left} y="2" width={Math.max(1, 100 * width)} height="6" />
        {arm.reward_mean !== null && <rect class="mean" x={100 * placeOf(arm.reward_mean, trial) - 1} y="0" width="2" height="10" />}
      </svg>{" "}
      <span class="quiet">{words}</span>
    </span>
  );
}

const TONES: Record<string, Tone> = { promoted: "good", returned: "bad" };

function Ended({ trials }: { trials: Trial[] }) {
  const rewards = (trial: Trial, arm: "candidate" | "live") => {
    const figures = trial.figures?.[arm];
    return figures && figures.reward_mean !== null ? `${short(figures.reward_mean)} of ${figures.rewarded}` : "–";
  };
  return (
    <Table
      caption="Ended trials"
      stacked
      rows={trials}
      id={(trial) => trial.version}
      empty="No trial has ended."
      columns={[
        { head: "Version", cell: (trial) => trial.version, number: true },
        { head: "Outcome", cell: (trial) => <Badge tone={TONES[trial.outcome] ?? "plain"}>{trial.outcome}</Badge> },
        { head: "Reward", cell: (trial) => rewards(trial, "candidate"), number: true },
        { head: "Live", cell: (trial) => rewards(trial, "live"), number: true },
        { head: "Took", cell: (trial) => duration(trial.ended_at === null ? null : trial.ended_at - trial.began_at), number: true },
        { head: "Ended", cell: (trial) => clock(trial.ended_at) },
        { head: "Why", cell: (trial) => trial.why },
      ]}
    />
  );
}
