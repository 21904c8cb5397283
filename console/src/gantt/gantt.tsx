// The timeline of nodes and engines as a drawing, with a table of the same for those who cannot see it.
import { useEffect, useRef, useState } from "preact/hooks";
import { clock, duration, share } from "../format";
import { Table } from "../parts/table";
import { bars, spent, type Row } from "./rows";

const HEIGHT = 22;
const NAMES = 150;

/** Color by state or role; those of one meaning share it. */
const CLASSES: Record<string, string> = {
  open: "work",
  rollout: "work",
  train: "train",
  held: "update",
  switching: "update",
  starting: "update",
  draining: "update",
  paused: "idle",
  asleep: "idle",
  idle: "idle",
  quarantined: "broken",
  dead: "broken",
};

interface Props {
  rows: Row[];
  from: number;
  to: number;
  /** When versions went live. */
  versions: { version: number; at: number }[];
}

export function Gantt({ rows, from, to, versions }: Props) {
  const box = useRef<HTMLDivElement>(null);
  const [width, setWidth] = useState(1000);
  useEffect(() => {
    const element = box.current!;
    const watch = new ResizeObserver(() => setWidth(element.clientWidth));
    watch.observe(element);
    return () => watch.disconnect();
  }, []);
  const wide = Math.max(100, width - NAMES);
  const x = (at: number) => NAMES + (wide * (at - from)) / (to - from);
  const height = (rows.length + 1) * HEIGHT + 18;
  const marks = versions.filter(({ at }) => at >= from && at <= to);
  const labeled = Math.max(1, Math.ceil((marks.length * 40) / wide));
  return (
    <div ref={box} class="gantt">
      <svg width={width} height={height} role="img" aria-label={`Timeline from ${clock(from)} to ${clock(to)}; the table below has the same figures`}>
        <text x={0} y={15} class="gantt-name quiet-text">
          live versions
        </text>
        {marks.map(({ version, at }, i) => (
          <g key={version}>
            <line x1={x(at)} x2={x(at)} y1={HEIGHT - 4} y2={height - 18} class="gantt-mark" />
            {i % labeled === 0 && (
              <text x={x(at)} y={14} class="gantt-tick">
                {version}
              </text>
            )}
          </g>
        ))}
        {rows.map((row, i) => (
          <g key={row.kind + row.name} transform={`translate(0 ${(i + 1) * HEIGHT})`}>
            <text x={row.kind === "node" ? 0 : 12} y={15} class={`gantt-name ${row.kind}`}>
              {row.name.length > 20 ? `${row.name.slice(0, 19)}…` : row.name}
            </text>
            {bars(row.spans, from, to, 2 / wide).map((bar) => (
              <g key={bar.from}>
                <rect x={NAMES + bar.left * wide} y={3} width={Math.max(1, bar.width * wide - 0.5)} height={HEIGHT - 6} rx={2} class={`gantt-bar ${CLASSES[bar.what] ?? "other"}`}>
                  <title>
                    {`${row.name}: ${bar.what}${bar.version === null || bar.version < 0 ? "" : `, version ${bar.version}`}${bar.reason ? `, ${bar.reason}` : ""}; ` +
                      `${clock(bar.from)} to ${bar.to === null ? "now" : clock(bar.to)}`}
                  </title>
                </rect>
                {bar.width * wide > bar.what.length * 7 + 8 && (
                  <text x={NAMES + bar.left * wide + 4} y={15} class="gantt-text">
                    {bar.what}
                  </text>
                )}
              </g>
            ))}
          </g>
        ))}
        {ends(wide < 320 ? [0, 1] : [0, 0.25, 0.5, 0.75, 1], (part) => clock(from + part * (to - from))).map((part) => (
          <text key={part} x={NAMES + part * wide} y={height - 3} class="gantt-tick" text-anchor={part === 0 ? "start" : part === 1 ? "end" : "middle"}>
            {clock(from + part * (to - from))}
          </text>
        ))}
      </svg>
      <ul class="legend" aria-label="Colors">
        {[
          ["work", "open, rollout"],
          ["train", "train"],
          ["update", "held, switching, starting, draining"],
          ["idle", "paused, asleep, idle"],
          ["broken", "quarantined, dead"],
        ].map(([name, text]) => (
          <li key={name}>
            <span class={`swatch ${name}`} /> {text}
          </li>
        ))}
      </ul>
      <details>
        <summary>Where the time went, as a table</summary>
        <Table
          caption="Time of nodes and engines by role and state"
          rows={rows.flatMap((row) => [...spent(row.spans, from, to)].map(([what, seconds]) => ({ row, what, seconds })))}
          id={({ row, what }) => `${row.kind} ${row.name} ${what}`}
          columns={[
            { head: "Kind", cell: ({ row }) => row.kind },
            { head: "Name", cell: ({ row }) => row.name },
            { head: "Role or state", cell: ({ what }) => what },
            { head: "Time", cell: ({ seconds }) => duration(seconds), number: true },
            { head: "Share", cell: ({ seconds }) => share(seconds / (to - from)), number: true },
          ]}
        />
      </details>
    </div>
  );
}

/** The parts whose label is another than that of the part before. */
const ends = (parts: readonly number[], label: (part: number) => string) => parts.filter((part, i) => i === 0 || label(part) !== label(parts[i - 1]!));
