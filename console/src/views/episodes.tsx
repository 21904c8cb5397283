import { Empty } from "../parts/notice";

export function EpisodesView() {
  return (
    <>
      <h1>Episodes</h1>
      <Empty>This view is being built.</Empty>
    </>
  );
}
