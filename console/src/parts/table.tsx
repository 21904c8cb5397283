// A table of some hundred rows at most; longer ones are virtual lists.
import type { ComponentChildren, JSX } from "preact";

export interface Column<Row> {
  head: ComponentChildren;
  cell: (row: Row) => ComponentChildren;
  /** Numbers stand at the right. */
  number?: boolean;
  class?: string;
}

interface Props<Row> {
  caption: string;
  columns: Column<Row>[];
  rows: readonly Row[];
  id: (row: Row) => string | number;
  empty?: ComponentChildren;
  /** Shows the caption to screen readers alone: a heading above repeats it. */
  quiet?: boolean;
  /** On a narrow screen each row is a list of its cells with their heads. */
  stacked?: boolean;
}

export function Table<Row>({ caption, columns, rows, id, empty = "none", quiet = true, stacked = false }: Props<Row>): JSX.Element {
  const side = (column: Column<Row>) => [column.number ? "number" : "", column.class ?? ""].join(" ").trim() || undefined;
  return (
    <div class={stacked ? "table-box stacked" : "table-box"} role="region" aria-label={caption} tabIndex={0}>
      <table>
        <caption class={quiet ? "unseen" : undefined}>{caption}</caption>
        <thead>
          <tr>
            {columns.map((column, i) => (
              <th key={i} scope="col" class={side(column)}>
                {column.head}
              </th>
            ))}
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={id(row)}>
              {columns.map((column, i) => (
                <td key={i} class={side(column)} data-head={stacked ? column.head : undefined}>
                  {column.cell(row)}
                </td>
              ))}
            </tr>
          ))}
          {!rows.length && (
            <tr>
              <td colSpan={columns.length} class="quiet">
                {empty}
              </td>
            </tr>
          )}
        </tbody>
      </table>
    </div>
  );
}
