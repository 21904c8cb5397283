/** What became of an episode, in words: the verdict, its tokens, its story. */

import { Badge } from "../parts/badge";
import { href } from "../router";
import type { Why } from "./types";
import { count, linked, moment } from "./words";

export function Words({ text }: { text: string }) {
  return (
    <>
      {linked(text).map((part, i) => (part.href ? <a key={i} href={part.href}>{part.text}</a> : part.text))}
    </>
  );
}

export function WhyView({ why }: { why: Why }) {
  const masked = Object.entries(why.masked_tokens);
  const untrained = masked.reduce((sum, [, tokens]) => sum + tokens, 0);
  return (
    <div class="why">
      <p class="verdict">
        <Words text={why.verdict} />
      </p>
      {why.notice && <p class="panel">{why.notice_words || why.notice}</p>}
      {why.error && (
        <section aria-label="What went wrong">
          <h2>What its agent or grader wrote last</h2>
          <pre class="panel" tabIndex={0}>
            {why.error}
          </pre>
        </section>
      )}
      <h2>Tokens</h2>
      <p>
        {count(why.sampled_tokens, "token")} sampled
        {untrained === 0 ? ", none left out." : `; ${count(untrained, "token")} left out:`}
      </p>
      {masked.length > 0 && (
        <ul>
          {masked.map(([reason, tokens]) => (
            <li key={reason}>
              {count(tokens, "token")}: {reason.replaceAll("_", " ")}
            </li>
          ))}
        </ul>
      )}
      {why.tool_faults.length > 0 && (
        <>
          <h2>Tool calls</h2>
          <ul>
            {why.tool_faults.map((fault) => (
              <li key={fault.call_id}>
                <code>{fault.call_id}</code>: {fault.words.join("; ")}
              </li>
            ))}
          </ul>
        </>
      )}
      <h2>Decisions</h2>
      {why.story.length === 0 && <p class="quiet">None is recorded.</p>}
      <ol class="story">
        {why.story.map((step, i) => (
          <li key={i}>
            <time class="quiet">{moment(step.at)}</time>
            <Badge tone={TONES[step.kind] ?? "plain"}>{step.about === "group" ? `group ${step.kind}` : step.kind.replaceAll("_", " ")}</Badge>
            <span>
              <Words text={step.words} />
              {step.about === "episode" && ENDS.has(step.kind) && step.reason && (
                <>
                  {" "}
                  <a class="quiet" href={href("episodes", { reason: step.reason })} title="Episodes that ended so">
                    {step.reason}
                  </a>
                </>
              )}
            </span>
          </li>
        ))}
      </ol>
      <p>
        <a href={href("episodes", { group: why.group_id })}>Episodes of the group {why.group_id}</a>
      </p>
    </div>
  );
}

/** Decisions whose reason is the one that the list can be filtered by. */
const ENDS = new Set(["dropped", "aborted"]);

const TONES: Record<string, "good" | "warn" | "bad" | "info"> = {
  admitted: "info",
  rewarded: "good",
  trained: "good",
  occupied: "info",
  dropped: "warn",
  refused: "warn",
  call_refused: "bad",
  aborted: "warn",
  skipped: "warn",
  masked: "warn",
  late: "warn",
  deleted: "bad",
};
