import { empty, replace } from "../dom.js";

export async function render(root) {
  replace(root, empty("Under construction"));
}
